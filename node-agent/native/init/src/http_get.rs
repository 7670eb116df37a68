//! Requests over loopback that the host asks for, to learn whether the workload's server is up.
//!
//! Only the status line is read. Nothing here waits: each request is a small state machine that poll drives.

use crate::frames::{HttpGetRequest, Report};
use crate::port::Port;
use crate::sys;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::io::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

/// How many may be under way at once: the host asks one at a time.
const MAX_RUNNING: usize = 8;

/// A status line is shorter; a server that sends more without a line's end does not speak HTTP.
const HEAD_BYTES: usize = 1 << 10;

/// No request takes longer than this: an hour, so that adding it to a clock cannot overflow.
const LONGEST: Duration = Duration::from_secs(3600);

struct Get {
    nonce: String,
    stream: TcpStream,
    unsent: Vec<u8>,
    head: Vec<u8>,
    timeout: Duration,
    deadline: Instant,
}

/// All of them.
#[derive(Default)]
pub struct Gets {
    running: Vec<Get>,
}

impl Gets {
    /// Begin a request. What comes of it is told to `port`.
    pub fn start(&mut self, request: HttpGetRequest, port: &mut Port) {
        let HttpGetRequest { nonce, port: number, path, timeout_ms } = request;
        if self.running.len() >= MAX_RUNNING {
            return tell(port, nonce, Err("too many requests at once".to_owned()));
        }
        // The host checks this too; a path that ends its line early would make a request of its own.
        if !path.starts_with('/') || !path.bytes().all(|byte| byte.is_ascii_graphic()) {
            return tell(port, nonce, Err("the path is not one".to_owned()));
        }
        let stream = match sys::connect_loopback(number) {
            Ok(stream) => stream,
            Err(error) => return tell(port, nonce, Err(format!("cannot connect to port {number}: {error}"))),
        };
        let unsent = format!(
            "GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{number}\r\nUser-Agent: forktree\r\nAccept: */*\r\nConnection: close\r\n\r\n"
        );
        let timeout = Duration::from_millis(timeout_ms).min(LONGEST);
        let (unsent, head, deadline) = (unsent.into_bytes(), Vec::new(), Instant::now() + timeout);
        self.running.push(Get { nonce, stream, unsent, head, timeout, deadline });
    }

    /// What to poll, and for which events.
    pub fn sources(&self) -> impl Iterator<Item = (RawFd, libc::c_short)> + '_ {
        self.running
            .iter()
            .map(|get| (get.stream.as_raw_fd(), if get.unsent.is_empty() { libc::POLLIN } else { libc::POLLOUT }))
    }

    /// When `expire` has to be called next.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.running.iter().map(|get| get.deadline).min()
    }

    /// Give up what has run out of time.
    pub fn expire(&mut self, now: Instant, port: &mut Port) {
        self.running.retain(|get| {
            let is_late = get.deadline <= now;
            if is_late {
                tell(port, get.nonce.clone(), Err(format!("no answer within {} ms", get.timeout.as_millis())));
            }
            !is_late
        });
    }

    /// Go on with the request whose connection has an event.
    pub fn proceed(&mut self, fd: RawFd, port: &mut Port) {
        if let Some(at) = self.running.iter().position(|get| get.stream.as_raw_fd() == fd) {
            if let Some(outcome) = self.running[at].proceed() {
                tell(port, self.running.remove(at).nonce, outcome);
            }
        }
    }
}

impl Get {
    /// None while it is under way.
    fn proceed(&mut self) -> Option<Result<u16, String>> {
        let advanced = if self.unsent.is_empty() { self.receive() } else { self.send().map(|()| None) };
        match advanced {
            Ok(outcome) => outcome,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => None,
            Err(error) => Some(Err(error.to_string())),
        }
    }

    fn send(&mut self) -> io::Result<()> {
        if let Some(refused) = self.stream.take_error()? {
            return Err(refused);
        }
        let count = self.stream.write(&self.unsent)?;
        self.unsent.drain(..count);
        Ok(())
    }

    fn receive(&mut self) -> io::Result<Option<Result<u16, String>>> {
        let mut buffer = [0; HEAD_BYTES];
        let count = self.stream.read(&mut buffer)?;
        self.head.extend_from_slice(&buffer[..count]);
        let line = self.head.split(|byte| *byte == b'\n').next().unwrap_or_default();
        let is_whole = line.len() < self.head.len();
        if is_whole {
            return Ok(Some(status_of(line).ok_or_else(|| "what answered does not speak HTTP".to_owned())));
        }
        if count == 0 || self.head.len() > HEAD_BYTES {
            return Ok(Some(Err("the connection ended without a status line".to_owned())));
        }
        Ok(None)
    }
}

/// The code in a status line like `HTTP/1.1 204 No Content`.
fn status_of(line: &[u8]) -> Option<u16> {
    let mut words = std::str::from_utf8(line).ok()?.split_ascii_whitespace();
    let (version, code) = (words.next()?, words.next()?);
    let is_status = version.starts_with("HTTP/1.") && code.len() == 3;
    code.parse().ok().filter(|_| is_status)
}

fn tell(port: &mut Port, nonce: String, outcome: Result<u16, String>) {
    let (status, message) = match outcome {
        Ok(status) => (Some(status), None),
        Err(message) => (None, Some(message)),
    };
    port.send(&Report::HttpStatus { nonce, status, message });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn asked(answer: &'static [u8]) -> (Result<u16, String>, Vec<u8>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let number = listener.local_addr().expect("its number").port();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a connection");
            let mut request = vec![0; 4096];
            let count = stream.read(&mut request).expect("a request");
            stream.write_all(answer).expect("written");
            request.truncate(count);
            request
        });
        let stream = sys::connect_loopback(number).expect("begun");
        let deadline = Instant::now() + Duration::from_secs(10);
        let (unsent, timeout) = (b"GET / HTTP/1.1\r\n\r\n".to_vec(), LONGEST);
        let mut get = Get { nonce: "n".to_owned(), stream, unsent, head: vec![], timeout, deadline };
        let outcome = loop {
            let events = if get.unsent.is_empty() { libc::POLLIN } else { libc::POLLOUT };
            let mut polled = [libc::pollfd { fd: get.stream.as_raw_fd(), events, revents: 0 }];
            sys::poll(&mut polled, Some(Duration::from_secs(10))).expect("polled");
            if let Some(outcome) = get.proceed() {
                break outcome;
            }
        };
        (outcome, server.join().expect("served"))
    }

    #[test]
    fn a_status_line_is_all_that_is_read() {
        let (outcome, request) = asked(b"HTTP/1.0 503 Not Yet\r\nA: b\r\n\r\nbody");
        assert_eq!(outcome, Ok(503));
        assert_eq!(request, b"GET / HTTP/1.1\r\n\r\n");
        assert_eq!(asked(b"HTTP/1.1 200\n\n").0, Ok(200));
    }

    #[test]
    fn what_does_not_speak_http_is_no_success() {
        for answer in
            [&b"200 OK\r\n"[..], b"SSH-2.0-x\r\n", b"HTTP/1.1 2000 X\r\n", b"HTTP/1.1 -20 X\r\n", b"", b"HTTP/1.1 200"]
        {
            assert!(asked(answer).0.is_err(), "{}", String::from_utf8_lossy(answer));
        }
    }
}
