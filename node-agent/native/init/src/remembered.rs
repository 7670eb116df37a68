//! Commands that have ended, remembered for a host that was not there to hear it.

use crate::frames::Report;
use crate::output::Output;
use crate::port::Port;
use std::collections::VecDeque;

/// How many. A host hears of each when it happens; these are for one that died just then.
const MAX_ENDED: usize = 64;

/// What their streams' ends may take together: the machine's own memory.
const ENDED_BYTES: usize = 1 << 20;

struct Ended {
    generation: String,
    id: String,
    report: Report,
    output: Output,
}

/// The last that ended, the newest at the end.
#[derive(Default)]
pub struct Remembered(VecDeque<Ended>);

impl Remembered {
    pub fn add(&mut self, generation: String, id: String, report: Report, output: Output) {
        self.forget(&id);
        self.0.push_back(Ended { generation, id, report, output });
        while self.0.len() > MAX_ENDED {
            self.0.pop_front();
        }
        let mut left = ENDED_BYTES;
        for ended in self.0.iter_mut().rev() {
            match left.checked_sub(ended.output.tail_bytes()) {
                Some(rest) => left = rest,
                None => ended.output.forget_tails(),
            }
        }
    }

    /// Another command is called so now.
    pub fn forget(&mut self, id: &str) {
        self.0.retain(|ended| ended.id != id);
    }

    /// Of the machine of this generation: those of the one it was forked from are told of there.
    pub fn ids<'a>(&'a self, generation: &'a str) -> impl Iterator<Item = &'a str> + 'a {
        self.0.iter().filter(move |ended| ended.generation == generation).map(|ended| ended.id.as_str())
    }

    /// Say once more how they ended.
    pub fn tell(&self, generation: &str, port: &mut Port) {
        for ended in self.0.iter().filter(|ended| ended.generation == generation) {
            port.send(&ended.report);
        }
    }

    /// Tell what is kept of one's output.
    pub fn replay(&mut self, generation: &str, id: &str, port: &mut Port) {
        for ended in self.0.iter_mut().filter(|ended| ended.id == id && ended.generation == generation) {
            ended.output.replay((generation, id), port);
        }
    }
}
