//! Connections to the outside are the parent's alone: in a machine that was forked from it they end.
//!
//! Both would otherwise speak under one address and one state of the protocol, and a program that waits for an answer
//! that the parent gets would wait for ever. Ended are TCP sockets and connected UDP sockets whose peer is outside.
//! Servers that listen, sockets without a peer and all that stays inside the machine are left alone.

use crate::socket_diag::{answers, Answer, Kind, SocketId};
use crate::sys;
use std::io;
use std::os::unix::io::OwnedFd;
use std::time::{Duration, Instant};

/// Ending one takes an emulated machine some 100 µs.
const LONGEST: Duration = Duration::from_secs(10);

/// How many are taken in at once; those above are found by listing again.
const MAX_LISTED: usize = 512;

/// How many are ended by one system call: a refusal of each fits into the socket's receive buffer.
const BATCH: usize = 64;

/// The kernel makes no longer datagrams for a reader with so much room. What did not fit would be an error.
const DATAGRAM_BYTES: usize = 8 << 10;

/// The way to end connections, opened once: emulated, a first system call of its kind takes 2 ms after every fork.
pub struct Connections(OwnedFd);

impl Connections {
    /// Fails where the kernel cannot list connections and end them. Such a machine must not be forked.
    pub fn open() -> io::Result<Self> {
        let connections = Self(sys::socket_diagnosis()?);
        for kind in Kind::ALL {
            connections.list(kind)?;
            // That there is no such socket is the answer of a kernel that would end it.
            sys::send(&connections.0, &kind.destroy(&SocketId::NONE))?;
            if connections.refusals()? != [Answer::Failed(libc::ENOENT)] {
                return Err(io::ErrorKind::Unsupported.into());
            }
        }
        Ok(connections)
    }

    /// End all connections to the outside. Nothing else may run meanwhile.
    pub fn end_outside(&self) -> io::Result<()> {
        let deadline = Instant::now() + LONGEST;
        for kind in Kind::ALL {
            while !self.end_listed(kind)? {
                if Instant::now() >= deadline {
                    let message = format!("there are more than could be ended in {} s", LONGEST.as_secs());
                    return Err(io::Error::new(io::ErrorKind::TimedOut, message));
                }
            }
        }
        Ok(())
    }

    /// End those that one listing shows. Returns whether that were all for certain.
    fn end_listed(&self, kind: Kind) -> io::Result<bool> {
        let Listed { outside, is_cut } = self.list(kind)?;
        let mut were_all = !is_cut;
        for batch in outside.chunks(BATCH) {
            let request: Vec<u8> = batch.iter().flat_map(|id| kind.destroy(id)).collect();
            sys::send(&self.0, &request)?;
            for answer in self.refusals()? {
                match answer {
                    // Reset by its peer meanwhile, if that was in this machine too; what is left may be a TIME_WAIT.
                    // Or another UDP socket has the same addresses and ports: by those, one at a time is found.
                    Answer::Failed(libc::ENOENT | libc::EOPNOTSUPP) => were_all = false,
                    Answer::Failed(errno) => return Err(io::Error::from_raw_os_error(errno)),
                    Answer::Socket(_) | Answer::End => (),
                }
            }
        }
        Ok(were_all)
    }

    fn list(&self, kind: Kind) -> io::Result<Listed> {
        let mut listed = Listed { outside: Vec::new(), is_cut: false };
        sys::send(&self.0, &kind.list())?;
        let mut buffer = [0; DATAGRAM_BYTES];
        loop {
            // Nothing is waited for: the kernel writes the next part of a list while the one before is read.
            let count = sys::read_available(&self.0, &mut buffer)?.ok_or(io::ErrorKind::UnexpectedEof)?;
            for answer in answers(&buffer[..count])? {
                match answer {
                    Answer::Socket(id) if kind.is_loopback(&id) => (),
                    Answer::Socket(_) if listed.outside.len() == MAX_LISTED => listed.is_cut = true,
                    Answer::Socket(id) => listed.outside.push(id),
                    Answer::Failed(errno) => return Err(io::Error::from_raw_os_error(errno)),
                    Answer::End => return Ok(listed),
                }
            }
        }
    }

    /// What the kernel refused of what was sent: it has done it all, and answered, when `send` returns.
    fn refusals(&self) -> io::Result<Vec<Answer>> {
        let mut all = Vec::new();
        let mut buffer = [0; DATAGRAM_BYTES];
        while let Some(count) = sys::read_available(&self.0, &mut buffer)? {
            all.extend(answers(&buffer[..count])?);
        }
        Ok(all)
    }
}

/// The connections of one kind that lead outside: all of them, or as many as are taken in at once.
struct Listed {
    outside: Vec<SocketId>,
    is_cut: bool,
}
