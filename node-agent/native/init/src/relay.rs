//! A connection to a server in this machine: a tool that carries what the host sends to the server, and back.
//!
//! Its input comes in pieces with their lengths before them, as that of all tools. A piece of length 0 is the end of what
//! the server is sent, and no end of the connection: the server may go on. Input that stops in any other way means that
//! nobody is at the other end any more, and then the server sees its connection reset.
//!
//! Its output is one line of JSON, and then what the server sends. Where that ends is told on standard error, as the
//! number of bytes that there were: the server may still take what comes.

use crate::sys;
use crate::transfer::{tell, Failed, Why};
use std::fs::File;
use std::io::{self, Write};
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpStream};
use std::os::unix::io::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// For a server whose queue is full.
const CONNECT: Duration = Duration::from_secs(10);

/// Held of each direction.
const BUFFER_BYTES: usize = 64 << 10;

const LENGTH_BYTES: usize = 4;

/// Connect to `port` and carry until both sides have ended, or one is gone.
pub fn relay(port: &str, output: &mut File) -> io::Result<()> {
    let server = match connected(port) {
        Ok(server) => server,
        Err(failed) => {
            tell::<()>(output, &Err(failed))?;
            return Err(io::ErrorKind::NotConnected.into());
        }
    };
    tell(output, &Ok(true))?;
    let input = io::stdin().as_fd().try_clone_to_owned()?;
    let output = output.as_fd().try_clone_to_owned()?;
    let mut told = io::stderr();
    Relay::new(server, input, output)?.run(&mut told)
}

fn connected(port: &str) -> Result<TcpStream, Failed> {
    let port = port.parse().map_err(|_| Failed::new(Why::Invalid, format!("{port:?} is no port")))?;
    let connect = |address: SocketAddr| TcpStream::connect_timeout(&address, CONNECT);
    // A server that listens at `localhost` may have taken either.
    connect((Ipv4Addr::LOCALHOST, port).into())
        .or_else(|error| connect((Ipv6Addr::LOCALHOST, port).into()).map_err(|_| error))
        .map_err(|error| match error.kind() {
            io::ErrorKind::ConnectionRefused => Failed::new(Why::Unreachable, "nobody listens there"),
            _ => Failed::new(Why::Unreachable, format!("cannot connect: {error}")),
        })
}

/// Takes the lengths away from what is sent in pieces.
#[derive(Default)]
struct Pieces {
    length: [u8; LENGTH_BYTES],
    have: usize,
    left: usize,
    is_over: bool,
}

impl Pieces {
    /// Append what `raw` holds of content to `to`. What comes after the end is not looked at.
    fn take(&mut self, mut raw: &[u8], to: &mut Vec<u8>) {
        while !raw.is_empty() && !self.is_over {
            if self.left > 0 {
                let (content, rest) = raw.split_at(self.left.min(raw.len()));
                to.extend_from_slice(content);
                self.left -= content.len();
                raw = rest;
                continue;
            }
            self.length[self.have] = raw[0];
            self.have += 1;
            raw = &raw[1..];
            if self.have == LENGTH_BYTES {
                self.have = 0;
                self.left = usize::try_from(u32::from_be_bytes(self.length)).unwrap_or(usize::MAX);
                self.is_over = self.left == 0;
            }
        }
    }
}

/// One direction: what was read and is not written yet.
#[derive(Default)]
struct Lane {
    held: Vec<u8>,
    sent: usize,
    /// Nothing more comes.
    ends: bool,
    /// And all of it went, and its receiver knows.
    is_over: bool,
}

impl Lane {
    fn is_empty(&self) -> bool {
        self.sent == self.held.len()
    }

    fn wants_more(&self) -> bool {
        !self.ends && self.is_empty()
    }

    /// Write what can be written now.
    fn write(&mut self, to: &impl AsRawFd) -> io::Result<()> {
        while !self.is_empty() {
            match sys::write_available(to, &self.held[self.sent..])? {
                Some(count) => self.sent += count,
                None => return Ok(()),
            }
        }
        self.held.clear();
        self.sent = 0;
        Ok(())
    }
}

struct Relay {
    server: TcpStream,
    input: OwnedFd,
    output: OwnedFd,
    pieces: Pieces,
    up: Lane,
    down: Lane,
    /// What the server has sent.
    bytes: u64,
    buffer: Vec<u8>,
}

impl Relay {
    fn new(server: TcpStream, input: OwnedFd, output: OwnedFd) -> io::Result<Self> {
        server.set_nonblocking(true)?;
        server.set_nodelay(true)?;
        // Killed or left alone, it ends as what it is: broken. Only `end_up` makes it an end.
        sys::reset_when_closed(&server, true)?;
        sys::set_nonblocking(&input)?;
        sys::set_nonblocking(&output)?;
        let (pieces, up, down) = (Pieces::default(), Lane::default(), Lane::default());
        Ok(Self { server, input, output, pieces, up, down, bytes: 0, buffer: vec![0; BUFFER_BYTES] })
    }

    fn run(mut self, told: &mut impl Write) -> io::Result<()> {
        while !(self.up.is_over && self.down.is_over) {
            let mut polled = self.wanted();
            sys::poll(&mut polled, None)?;
            if polled[0].revents & (libc::POLLHUP | libc::POLLERR) != 0 {
                // Nobody sends any more, and nobody said that this is the end.
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            self.carry_up(polled[0].revents & libc::POLLIN != 0)?;
            self.carry_down(polled[1].revents & (libc::POLLIN | libc::POLLHUP | libc::POLLERR) != 0, told)?;
        }
        Ok(())
    }

    /// Input, server, output. What is not waited for is left out: the end of a server that nothing is read from now
    /// would be told over and over.
    fn wanted(&self) -> [libc::pollfd; 3] {
        let when = |wanted: bool, event: libc::c_short| if wanted { event } else { 0 };
        let entry = |fd: RawFd, events: libc::c_short| libc::pollfd { fd, events, revents: 0 };
        let (reads, writes) = (self.down.wants_more(), !self.up.is_empty());
        let server = if reads || writes { self.server.as_raw_fd() } else { -1 };
        let output = if self.down.is_empty() { -1 } else { self.output.as_raw_fd() };
        [
            entry(self.input.as_raw_fd(), when(self.up.wants_more(), libc::POLLIN)),
            entry(server, when(reads, libc::POLLIN) | when(writes, libc::POLLOUT)),
            entry(output, libc::POLLOUT),
        ]
    }

    fn carry_up(&mut self, can_read: bool) -> io::Result<()> {
        if can_read && self.up.wants_more() {
            match sys::read_available(&self.input, &mut self.buffer)? {
                None => (),
                Some(0) => return Err(io::ErrorKind::BrokenPipe.into()),
                Some(count) => {
                    self.pieces.take(&self.buffer[..count], &mut self.up.held);
                    self.up.ends = self.pieces.is_over;
                }
            }
        }
        self.up.write(&self.server)?;
        if self.up.ends && self.up.is_empty() && !self.up.is_over {
            self.up.is_over = true;
            sys::reset_when_closed(&self.server, false)?;
            // Fails where the server has reset it: reading tells.
            let _ = self.server.shutdown(Shutdown::Write);
        }
        Ok(())
    }

    fn carry_down(&mut self, can_read: bool, told: &mut impl Write) -> io::Result<()> {
        if can_read && self.down.wants_more() {
            match sys::read_available(&self.server, &mut self.buffer)? {
                None => (),
                Some(0) => self.down.ends = true,
                Some(count) => {
                    self.down.held.extend_from_slice(&self.buffer[..count]);
                    self.bytes += u64::try_from(count).unwrap_or(u64::MAX);
                }
            }
        }
        self.down.write(&self.output)?;
        if self.down.ends && self.down.is_empty() && !self.down.is_over {
            self.down.is_over = true;
            writeln!(told, "{}", self.bytes)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Read;
    use std::net::TcpListener;
    use std::thread::{self, JoinHandle};

    /// A relay at work, with what it is told and what it tells.
    struct Carried {
        input: Option<File>,
        output: File,
        server: TcpStream,
        relay: JoinHandle<(io::Result<()>, Vec<u8>)>,
    }

    impl Carried {
        fn new() -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
            let port = listener.local_addr().expect("its number").port();
            let ours = connected(&port.to_string()).expect("connected");
            let (server, _) = listener.accept().expect("a connection");
            let (input, writer) = sys::input_pipe().expect("a pipe");
            let (reader, output) = sys::input_pipe().expect("a pipe");
            let relay = thread::spawn(move || {
                let mut told = Vec::new();
                (Relay::new(ours, input, output).expect("a relay").run(&mut told), told)
            });
            Self { input: Some(File::from(writer)), output: File::from(reader), server, relay }
        }

        fn send(&mut self, piece: &[u8]) {
            let mut bytes = u32::try_from(piece.len()).expect("short").to_be_bytes().to_vec();
            bytes.extend(piece);
            self.input.as_mut().expect("open").write_all(&bytes).expect("there is room");
        }
    }

    #[test]
    fn each_side_ends_for_itself() {
        let mut carried = Carried::new();
        carried.send(b"question");
        carried.send(b"");
        let mut got = String::new();
        carried.server.read_to_string(&mut got).expect("an end, and no reset");
        assert_eq!(got, "question");
        carried.server.write_all(b"answer").expect("still taken");
        let Carried { input, mut output, server, relay } = carried;
        drop(server);
        let mut answer = String::new();
        output.read_to_string(&mut answer).expect("read");
        let (outcome, told) = relay.join().expect("no panic");
        assert!(outcome.is_ok() && input.is_some());
        assert_eq!((answer.as_str(), told.as_slice()), ("answer", &b"6\n"[..]));
    }

    #[test]
    fn a_server_that_ends_first_is_still_sent_to() {
        let mut carried = Carried::new();
        carried.server.write_all(b"bye").expect("written");
        carried.server.shutdown(Shutdown::Write).expect("ended");
        let mut said = [0; 3];
        carried.output.read_exact(&mut said).expect("read");
        carried.send(b"more");
        carried.send(b"");
        let mut got = String::new();
        carried.server.read_to_string(&mut got).expect("an end");
        assert_eq!((&said, got.as_str()), (b"bye", "more"));
        assert!(carried.relay.join().expect("no panic").0.is_ok());
    }

    #[test]
    fn a_connection_that_nobody_holds_any_more_is_reset() {
        let mut carried = Carried::new();
        carried.send(b"half");
        let mut got = [0; 4];
        carried.server.read_exact(&mut got).expect("read");
        carried.input = None;
        let error = carried.server.read(&mut got).expect_err("no end");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
        assert!(carried.relay.join().expect("no panic").0.is_err());
    }

    #[test]
    fn much_goes_both_ways_at_once_without_waiting_for_the_other() {
        const BYTES: usize = 3 << 20;
        let Carried { input, mut output, mut server, relay } = Carried::new();
        let mut writer = input.expect("open");
        let mut theirs = server.try_clone().expect("the same");
        let sender = thread::spawn(move || {
            let mut all: Vec<u8> = u32::try_from(BYTES).expect("short").to_be_bytes().to_vec();
            all.extend(vec![b'u'; BYTES]);
            all.extend([0; 4]);
            let mut at = 0;
            while at < all.len() {
                let mut polled = [libc::pollfd { fd: writer.as_raw_fd(), events: libc::POLLOUT, revents: 0 }];
                sys::poll(&mut polled, None).expect("polled");
                at += sys::write_available(&writer, &all[at..]).expect("written").unwrap_or(0);
            }
            writer.flush().expect("nothing is held");
            writer
        });
        let talker = thread::spawn(move || {
            theirs.write_all(&vec![b'd'; BYTES]).expect("written");
            theirs.shutdown(Shutdown::Write).expect("ended");
        });
        let reader = thread::spawn(move || {
            let mut got = Vec::new();
            output.read_to_end(&mut got).expect("read");
            got.len()
        });
        let mut got = Vec::new();
        server.read_to_end(&mut got).expect("an end");
        assert_eq!((got.len(), reader.join().expect("read")), (BYTES, BYTES));
        talker.join().expect("told");
        drop(sender.join().expect("sent"));
        assert_eq!(relay.join().expect("no panic").1, format!("{BYTES}\n").into_bytes());
    }

    #[test]
    fn where_nobody_listens_is_said() {
        let port = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("its number").port();
        assert_eq!(connected(&port.to_string()).expect_err("refused").why, Why::Unreachable);
        assert_eq!(connected("70000").expect_err("refused").why, Why::Invalid);
    }

    proptest! {
        #[test]
        fn pieces_come_out_whole_however_they_are_cut(
            pieces in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..50), 0..8),
            cut in 1_usize..20,
        ) {
            let mut bytes = Vec::new();
            for piece in &pieces {
                bytes.extend(u32::try_from(piece.len()).unwrap_or(0).to_be_bytes());
                bytes.extend(piece);
            }
            bytes.extend([0; 4]);
            bytes.extend(b"after");
            let (mut taking, mut got) = (Pieces::default(), Vec::new());
            for raw in bytes.chunks(cut) {
                taking.take(raw, &mut got);
            }
            prop_assert!(taking.is_over);
            prop_assert_eq!(got, pieces.concat());
        }
    }
}
