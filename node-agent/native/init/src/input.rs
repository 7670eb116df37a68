//! Input of a command that stays open: what the host sends goes on as fast as the command takes it.

use crate::sys;
use std::collections::VecDeque;
use std::os::unix::io::{AsRawFd, OwnedFd, RawFd};

/// What ends the input of whoever reads a terminal.
const END_OF_TRANSMISSION: u8 = 4;

/// The open input of one command.
pub struct Input {
    /// None once the command can get no more.
    writer: Option<OwnedFd>,
    is_terminal: bool,
    /// The host promises to send no more than a little ahead of what it is told to be taken.
    pending: VecDeque<u8>,
    received: u64,
    taken: u64,
    ends: bool,
}

impl Input {
    /// `writer` does not block.
    pub fn new(writer: OwnedFd, is_terminal: bool) -> Self {
        Self { writer: Some(writer), is_terminal, pending: VecDeque::new(), received: 0, taken: 0, ends: false }
    }

    /// What to poll for writing.
    pub fn wanted(&self) -> Option<RawFd> {
        self.writer.as_ref().filter(|_| !self.pending.is_empty()).map(AsRawFd::as_raw_fd)
    }

    /// The terminal, for its size.
    pub fn terminal(&self) -> Option<&OwnedFd> {
        self.writer.as_ref().filter(|_| self.is_terminal)
    }

    pub fn received(&self) -> u64 {
        self.received
    }

    /// How much is with the command, and whether it takes more.
    pub fn taken(&self) -> (u64, bool) {
        (self.taken, self.writer.is_some() && !self.ends)
    }

    /// What a frame has brought.
    pub fn feed(&mut self, data: &[u8], end: bool) {
        self.received += u64::try_from(data.len()).unwrap_or(u64::MAX);
        if self.writer.is_none() || self.ends {
            self.taken = self.received; // Nobody is going to read it.
            return;
        }
        self.pending.extend(data);
        if end && self.is_terminal {
            self.pending.push_back(END_OF_TRANSMISSION); // It stays open: whoever writes to it reads it too.
        } else {
            self.ends = end;
        }
        self.pump();
    }

    /// Give the command what it takes now.
    pub fn pump(&mut self) {
        while let Some(writer) = &self.writer {
            let (front, _) = self.pending.as_slices();
            if front.is_empty() {
                break;
            }
            match sys::write_available(writer, front) {
                Ok(Some(count)) => drop(self.pending.drain(..count)),
                Ok(None) => break,
                Err(_) => self.close(), // It has closed its end.
            }
        }
        if self.ends && self.pending.is_empty() {
            self.writer = None;
        }
        let waiting = u64::try_from(self.pending.len()).unwrap_or(u64::MAX);
        self.taken = self.taken.max(self.received.saturating_sub(waiting));
    }

    /// The command has ended.
    pub fn close(&mut self) {
        self.writer = None;
        self.pending.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(reader: &OwnedFd) -> Vec<u8> {
        let mut buffer = vec![0; 1 << 20];
        let count = sys::read_available(reader, &mut buffer).expect("read").unwrap_or(0);
        buffer.truncate(count);
        buffer
    }

    #[test]
    fn what_the_command_does_not_take_yet_waits() {
        let (reader, writer) = sys::input_pipe().expect("a pipe");
        sys::set_nonblocking(&reader).expect("set");
        let mut input = Input::new(writer, false);
        input.feed(&vec![b'x'; 100_000], false);
        let (taken, open) = input.taken();
        assert!(open && taken < 100_000 && input.wanted().is_some());
        input.feed(b"end", true);
        assert_eq!(read(&reader).len(), usize::try_from(taken).expect("small"));
        input.pump();
        assert_eq!((input.taken(), input.received()), ((100_003, false), 100_003));
        assert!(read(&reader).ends_with(b"xend"));
        assert_eq!(sys::read_available(&reader, &mut [0]).expect("read"), Some(0), "the end");
        input.feed(b"late", false);
        assert_eq!(input.taken(), (100_007, false));
    }

    #[test]
    fn a_command_that_reads_no_more_takes_all_there_is() {
        let (reader, writer) = sys::input_pipe().expect("a pipe");
        let mut input = Input::new(writer, false);
        drop(reader);
        input.feed(b"lost", false);
        assert_eq!((input.taken(), input.wanted()), ((4, false), None));
    }
}
