//! The guest's end of the channel to the host: requests in, reports out, never blocking.

use crate::frames::{Lines, Report, Request};
use crate::sys;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::io::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

/// With this much unsent, commands' output waits in its pipes.
const OUTPUT_HIGH_BYTES: usize = 256 << 10;

/// With this much unsent, requests wait as well: a host that only asks and never listens fills no memory here.
const REQUESTS_HIGH_BYTES: usize = 4 << 20;

/// Read at most this much before others get a turn. The driver hands out a page at a time.
const READ_TURN_BYTES: usize = 1 << 20;

/// While nobody holds the host's end, the driver reports a hang-up at every poll. The host keeps that end open for as
/// long as the machine lives, so this is for the moment before it is connected.
const HANG_UP_PAUSE: Duration = Duration::from_millis(50);

/// An open virtio console port.
pub struct Port {
    file: File,
    lines: Lines,
    unsent: VecDeque<Vec<u8>>,
    unsent_bytes: usize,
    /// How much of the first unsent frame is sent.
    sent_of_first: usize,
    hung_up_until: Option<Instant>,
}

impl Port {
    pub fn new(file: File) -> Self {
        let (lines, unsent) = (Lines::default(), VecDeque::new());
        Self { file, lines, unsent, unsent_bytes: 0, sent_of_first: 0, hung_up_until: None }
    }

    /// Queue a report; `flush` sends it.
    pub fn send(&mut self, report: &Report) {
        let frame = report.encode();
        self.unsent_bytes += frame.len();
        self.unsent.push_back(frame);
    }

    /// Whether more output of commands may be queued.
    pub fn takes_output(&self) -> bool {
        self.unsent_bytes < OUTPUT_HIGH_BYTES
    }

    /// Send as much as the host takes now.
    pub fn flush(&mut self) -> io::Result<()> {
        while let Some(frame) = self.unsent.front() {
            match self.file.write(&frame[self.sent_of_first..]) {
                Ok(count) => self.sent_of_first += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
                Err(error) => return Err(error),
            }
            if self.sent_of_first == frame.len() {
                self.unsent_bytes -= frame.len();
                self.unsent.pop_front();
                self.sent_of_first = 0;
            }
        }
        Ok(())
    }

    /// The requests that have arrived. What is no request is left out.
    pub fn receive(&mut self) -> io::Result<Vec<Request>> {
        let mut requests = Vec::new();
        let mut buffer = [0; 16 << 10];
        let mut taken = 0;
        while taken < READ_TURN_BYTES {
            match sys::read_available(&self.file, &mut buffer)? {
                None => break,
                Some(0) => {
                    self.hung_up_until = Some(Instant::now() + HANG_UP_PAUSE);
                    break;
                }
                Some(count) => {
                    taken += count;
                    let lines = self.lines.feed(&buffer[..count]);
                    requests.extend(lines.iter().filter_map(|line| Request::decode(line)));
                }
            }
        }
        Ok(requests)
    }

    /// What to poll for now; 0: nothing, not even a hang-up.
    pub fn interest(&self, now: Instant) -> libc::c_short {
        if self.resumes(now).is_some() {
            return 0;
        }
        let mut events = 0;
        if self.unsent_bytes < REQUESTS_HIGH_BYTES {
            events |= libc::POLLIN;
        }
        if !self.unsent.is_empty() {
            events |= libc::POLLOUT;
        }
        events
    }

    /// When to look at the port again although nothing happened there.
    pub fn resumes(&self, now: Instant) -> Option<Instant> {
        self.hung_up_until.filter(|until| *until > now)
    }
}

impl AsRawFd for Port {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}
