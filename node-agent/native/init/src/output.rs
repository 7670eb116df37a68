//! What a command writes: how much of it may be told, and the end of it that is kept for a host that asks again.

use crate::frames::{Blob, Flow, Report, Stream};
use crate::port::Port;
use std::collections::VecDeque;

/// Output travels in frames of this much, before base64: the driver takes such a frame whole.
pub const CHUNK_BYTES: usize = 16 << 10;

/// Told unasked by a command whose host is another now, until that host grants for itself; then it is read and dropped.
const UNASKED_BYTES: u64 = 16 << 20;

/// What all commands together may keep here of their streams' ends: it is the machine's own memory.
const TAILS_BYTES: usize = 2 << 20;

/// Both streams of one command.
pub struct Output {
    stdout: Told,
    stderr: Told,
    rule: Rule,
    /// What was told of both, since its host began to grant.
    told: u64,
    /// Some of it was dropped because there was more than may be told at all.
    pub truncated: bool,
}

enum Rule {
    /// So much more may be told.
    Limit(usize),
    Flow(Flow),
}

/// Of one stream.
#[derive(Default)]
struct Told {
    /// How much it has had so far, told or not.
    offset: u64,
    tail: VecDeque<u8>,
}

impl Told {
    fn keep(&mut self, output: &[u8], limit: usize) {
        self.tail.extend(&output[output.len().saturating_sub(limit)..]);
        let excess = self.tail.len().saturating_sub(limit);
        self.tail.drain(..excess);
    }
}

/// As long as the rest of memory.
fn long(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

impl Output {
    pub fn new(limit: usize, flow: Option<Flow>) -> Self {
        let rule = flow.map_or(Rule::Limit(limit), Rule::Flow);
        Self { stdout: Told::default(), stderr: Told::default(), rule, told: 0, truncated: false }
    }

    /// How much may be read from the command now; 0: it has to wait.
    pub fn room(&self) -> usize {
        match &self.rule {
            Rule::Flow(Flow { granted, waits: true, .. }) => {
                usize::try_from(granted.saturating_sub(self.told)).unwrap_or(usize::MAX).min(CHUNK_BYTES)
            }
            _ => CHUNK_BYTES,
        }
    }

    /// Whether its end is kept, so that its host can ask for it again.
    pub fn is_kept(&self) -> bool {
        matches!(&self.rule, Rule::Flow(flow) if flow.tail_bytes > 0)
    }

    /// Whether the host wants to know when it runs.
    pub fn flows(&self) -> bool {
        matches!(&self.rule, Rule::Flow(_))
    }

    pub fn grant(&mut self, granted: u64, waits: bool) {
        if let Rule::Flow(flow) = &mut self.rule {
            *flow = Flow { granted, waits, tail_bytes: flow.tail_bytes };
        }
    }

    /// Whoever granted is not there any more, and perhaps nobody is: the command goes on by itself.
    pub fn let_go(&mut self) {
        self.told = 0;
        self.grant(UNASKED_BYTES, false);
    }

    /// Nobody is going to hear of it.
    pub fn drop_all(&mut self) {
        self.told = 0;
        self.grant(0, false);
    }

    /// Take what was read. `kept_by` commands share the room for ends of streams.
    pub fn take(
        &mut self,
        (generation, id): (&str, &str),
        stream: Stream,
        output: &[u8],
        kept_by: usize,
        port: &mut Port,
    ) {
        let told = match stream {
            Stream::Stdout => &mut self.stdout,
            Stream::Stderr => &mut self.stderr,
        };
        let count = match &mut self.rule {
            Rule::Limit(left) => {
                let count = output.len().min(*left);
                *left -= count;
                self.truncated |= count < output.len();
                count
            }
            Rule::Flow(flow) => {
                let share = TAILS_BYTES / 2 / kept_by.max(1);
                told.keep(output, flow.tail_bytes.min(share));
                usize::try_from(flow.granted.saturating_sub(self.told)).unwrap_or(usize::MAX).min(output.len())
            }
        };
        if count > 0 {
            send((generation, id), stream, told.offset, &output[..count], port);
        }
        told.offset += long(output.len());
        self.told += long(count);
    }

    /// Tell the kept ends once more.
    pub fn replay(&mut self, names: (&str, &str), port: &mut Port) {
        for (stream, told) in [(Stream::Stdout, &mut self.stdout), (Stream::Stderr, &mut self.stderr)] {
            let mut offset = told.offset - long(told.tail.len());
            for chunk in told.tail.make_contiguous().chunks(CHUNK_BYTES) {
                send(names, stream, offset, chunk, port);
                offset += long(chunk.len());
            }
        }
    }

    /// What it takes here.
    pub fn tail_bytes(&self) -> usize {
        self.stdout.tail.len() + self.stderr.tail.len()
    }

    /// Give that back.
    pub fn forget_tails(&mut self) {
        self.stdout.tail = VecDeque::new();
        self.stderr.tail = VecDeque::new();
    }
}

fn send((generation, id): (&str, &str), stream: Stream, offset: u64, output: &[u8], port: &mut Port) {
    let (generation, id, data) = (generation.to_owned(), id.to_owned(), Blob(output.to_vec()));
    port.send(&Report::Output { generation, id, stream, offset, data });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Seek};

    /// What a port sends, as text.
    struct Heard(File, Port);

    impl Heard {
        fn new() -> Self {
            let file = File::from(crate::sys::memory_file(b"").expect("a file"));
            Self(file.try_clone().expect("the same file"), Port::new(file))
        }

        fn frames(&mut self) -> Vec<(u64, String)> {
            self.1.flush().expect("written");
            let mut text = String::new();
            self.0.rewind().expect("at its start");
            self.0.read_to_string(&mut text).expect("text");
            self.0.set_len(0).expect("empty");
            self.0.rewind().expect("at its start");
            text.lines()
                .map(|line| {
                    let frame: serde_json::Value = serde_json::from_str(line).expect("a frame");
                    let data: Blob = serde_json::from_value(frame["data"].clone()).expect("data");
                    (frame["offset"].as_u64().expect("an offset"), String::from_utf8(data.0).expect("text"))
                })
                .collect()
        }
    }

    fn flow(granted: u64, waits: bool, tail_bytes: usize) -> Output {
        Output::new(0, Some(Flow { granted, waits, tail_bytes }))
    }

    fn take(output: &mut Output, text: &str, heard: &mut Heard) {
        output.take(("g", "a"), Stream::Stdout, text.as_bytes(), 1, &mut heard.1);
    }

    #[test]
    fn a_command_that_waits_is_read_no_further_than_was_granted() {
        let (mut output, mut heard) = (flow(5, true, 100), Heard::new());
        assert_eq!(output.room(), 5);
        take(&mut output, "12345", &mut heard);
        assert_eq!((output.room(), heard.frames()), (0, vec![(0, "12345".to_owned())]));
        output.grant(7, true);
        assert_eq!(output.room(), 2);
        output.let_go();
        assert_eq!(output.room(), CHUNK_BYTES);
    }

    #[test]
    fn one_that_does_not_wait_is_read_and_told_only_what_was_granted() {
        let (mut output, mut heard) = (flow(3, false, 4), Heard::new());
        take(&mut output, "12345", &mut heard);
        take(&mut output, "67", &mut heard);
        assert_eq!(heard.frames(), [(0, "123".to_owned())]);
        output.grant(5, true);
        assert_eq!(output.room(), 2);
        take(&mut output, "89", &mut heard);
        assert_eq!(heard.frames(), [(7, "89".to_owned())]);
        output.replay(("g", "a"), &mut heard.1);
        assert_eq!(heard.frames(), [(5, "6789".to_owned())]);
        output.forget_tails();
        output.replay(("g", "a"), &mut heard.1);
        assert!(heard.frames().is_empty());
        assert!(!output.truncated);
    }

    #[test]
    fn the_room_for_ends_is_shared() {
        let (mut output, mut heard) = (flow(0, false, usize::MAX), Heard::new());
        for _ in 0..200 {
            output.take(("g", "a"), Stream::Stderr, &[b'x'; CHUNK_BYTES], 8, &mut heard.1);
        }
        assert_eq!(output.tail_bytes(), TAILS_BYTES / 16);
    }

    #[test]
    fn without_a_flow_there_is_a_limit_and_nothing_is_kept() {
        let (mut output, mut heard) = (Output::new(3, None), Heard::new());
        take(&mut output, "12345", &mut heard);
        output.grant(1000, true);
        take(&mut output, "67", &mut heard);
        output.replay(("g", "a"), &mut heard.1);
        assert_eq!(heard.frames(), [(0, "123".to_owned())]);
        assert!(output.truncated && !output.is_kept() && !output.flows());
    }
}
