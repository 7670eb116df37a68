//! How file tools speak with the host: one line of JSON first, then bytes; and what they are sent, in pieces.
//!
//! A tool is a command like others, so its input could end because somebody killed the sender. Each piece that is sent
//! to it has its length before it, and only a piece of length 0 says that all is there.

use crate::sys;
use serde::Serialize;
use std::io::{self, Read, Write};
use std::os::unix::io::AsRawFd;
use std::time::Duration;

/// Who sends nothing for this long is gone: what it began is taken back.
const SILENCE: Duration = Duration::from_secs(120);

/// Why a tool did nothing, in a word that the host knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    NotFound,
    Denied,
    /// Something else is there than what it takes.
    WrongKind,
    /// A folder that holds something.
    NotEmpty,
    /// No room.
    Full,
    /// Nobody is there to connect to.
    Unreachable,
    /// What was sent makes no sense, or is not whole.
    Invalid,
    Internal,
}

/// A tool's failure, for programs and for people.
#[derive(Debug, PartialEq, Eq)]
pub struct Failed {
    pub why: Why,
    pub message: String,
}

impl Failed {
    pub fn new(why: Why, message: impl Into<String>) -> Self {
        Self { why, message: message.into() }
    }

    /// `what` was tried.
    pub fn of(what: &str, error: &io::Error) -> Self {
        let why = match error.raw_os_error() {
            Some(libc::ENOENT) => Why::NotFound,
            Some(libc::EACCES | libc::EPERM | libc::EROFS | libc::ETXTBSY) => Why::Denied,
            Some(libc::EISDIR | libc::ENOTDIR | libc::EEXIST | libc::EBUSY | libc::ELOOP | libc::ENAMETOOLONG) => {
                Why::WrongKind
            }
            Some(libc::ENOTEMPTY) => Why::NotEmpty,
            Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG | libc::ENOMEM) => Why::Full,
            Some(_) => Why::Internal,
            None => Why::Invalid, // Of ours or of the archive's reader.
        };
        Self::new(why, format!("{what}: {error}"))
    }
}

#[derive(Serialize)]
struct Told<'a, T: Serialize> {
    ok: Option<T>,
    why: Option<Why>,
    message: Option<&'a str>,
}

/// The line that says what was done, or what the bytes after it are.
pub fn tell<T: Serialize>(to: &mut impl Write, outcome: &Result<T, Failed>) -> io::Result<()> {
    let told = match outcome {
        Ok(done) => Told { ok: Some(done), why: None, message: None },
        Err(Failed { why, message }) => Told { ok: None, why: Some(*why), message: Some(message) },
    };
    serde_json::to_writer(&mut *to, &told)?;
    to.write_all(b"\n")?;
    to.flush()
}

/// What is sent, without the lengths. It ends only where it was said to end.
pub struct Sent<R> {
    from: R,
    left: usize,
    is_over: bool,
}

impl<R: Read + AsRawFd> Sent<R> {
    pub fn new(from: R) -> Self {
        Self { from, left: 0, is_over: false }
    }

    /// Read what comes after what mattered, to be sure that all was sent.
    pub fn finish(mut self) -> io::Result<()> {
        io::copy(&mut self, &mut io::sink()).map(drop)
    }

    fn wait(&self) -> io::Result<()> {
        let mut polled = [libc::pollfd { fd: self.from.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
        sys::poll(&mut polled, Some(SILENCE))?;
        if polled[0].revents == 0 {
            return Err(io::Error::new(io::ErrorKind::Other, "nothing more was sent"));
        }
        Ok(())
    }

    fn begin_piece(&mut self) -> io::Result<()> {
        let mut length = [0; 4];
        let mut have = 0;
        while have < length.len() {
            self.wait()?;
            match self.from.read(&mut length[have..])? {
                0 => return Err(io::Error::new(io::ErrorKind::Other, "it was not sent to its end")),
                count => have += count,
            }
        }
        self.left = usize::try_from(u32::from_be_bytes(length)).map_err(|_| io::ErrorKind::InvalidData)?;
        self.is_over = self.left == 0;
        Ok(())
    }
}

impl<R: Read + AsRawFd> Read for Sent<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 && !self.is_over {
            self.begin_piece()?;
        }
        if self.is_over || buffer.is_empty() {
            return Ok(0);
        }
        self.wait()?;
        let room = self.left.min(buffer.len());
        match self.from.read(&mut buffer[..room])? {
            0 => Err(io::Error::new(io::ErrorKind::Other, "it was not sent to its end")),
            count => {
                self.left -= count;
                Ok(count)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sent(bytes: &[u8]) -> Sent<std::fs::File> {
        Sent::new(std::fs::File::from(sys::memory_file(bytes).expect("a file")))
    }

    #[test]
    fn pieces_are_put_together() {
        let mut text = String::new();
        sent(b"\0\0\0\x03abc\0\0\0\x01d\0\0\0\0rest").read_to_string(&mut text).expect("read");
        assert_eq!(text, "abcd");
        assert!(sent(b"\0\0\0\0").finish().is_ok());
    }

    #[test]
    fn what_is_cut_off_anywhere_is_no_end() {
        let whole = b"\0\0\0\x03abc\0\0\0\0";
        for length in 0..whole.len() {
            assert!(sent(&whole[..length]).finish().is_err(), "{length}");
        }
        assert!(sent(whole).finish().is_ok());
    }

    #[test]
    fn the_first_line_says_how_it_went() {
        let mut line = Vec::new();
        tell(&mut line, &Ok(3)).expect("written");
        tell::<()>(&mut line, &Err(Failed::new(Why::NotEmpty, "why \"it\""))).expect("written");
        let expected = concat!(
            "{\"ok\":3,\"why\":null,\"message\":null}\n",
            "{\"ok\":null,\"why\":\"not_empty\",\"message\":\"why \\\"it\\\"\"}\n"
        );
        assert_eq!(String::from_utf8(line).expect("text"), expected);
    }

    proptest! {
        #[test]
        fn pieces_of_any_length_make_no_room_for_more_than_there_is(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut got = Vec::new();
            let whole = sent(&bytes).read_to_end(&mut got).is_ok();
            prop_assert!(got.len() <= bytes.len());
            prop_assert!(got.capacity() <= 4096, "a length that is a lie is not believed");
            prop_assert!(!whole || bytes.windows(4).any(|four| four == [0; 4]));
        }

        #[test]
        fn what_is_sent_in_any_pieces_comes_out_whole(pieces in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..50), 0..8)) {
            let mut bytes = Vec::new();
            for piece in &pieces {
                bytes.extend(u32::try_from(piece.len()).unwrap_or(0).to_be_bytes());
                bytes.extend(piece);
            }
            bytes.extend([0; 4]);
            let mut got = Vec::new();
            sent(&bytes).read_to_end(&mut got).expect("whole");
            prop_assert_eq!(got, pieces.concat());
        }
    }
}
