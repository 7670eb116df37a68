//! What is said over the guest channel: one JSON object a line, in both directions.
//!
//! A newline cannot occur inside JSON, so a line cut off by a fork ends at the newline that the host sends first,
//! is no valid JSON and is dropped. No frame to the host holds a second object, so the tail of a cut one can never
//! be taken for a whole one there.

use base64::engine::general_purpose::STANDARD;
use base64::Engine;
use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;

/// Version of this protocol, said in `booted`.
pub const PROTOCOL: u32 = 3;

/// Longer lines are dropped whole: 16 MiB of input in base64, and room for arguments.
pub const MAX_LINE_BYTES: usize = 24 << 20;

/// The generation of a machine that has had no identity yet.
pub const NIL_GENERATION: &str = "00000000-0000-0000-0000-000000000000";

/// Names and values of environment variables.
pub type Env = BTreeMap<String, String>;

/// Bytes that travel as base64.
#[derive(Clone, PartialEq, Eq)]
pub struct Blob(pub Vec<u8>);

impl std::fmt::Debug for Blob {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Blob({} bytes)", self.0.len())
    }
}

impl Serialize for Blob {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Blob {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(BlobVisitor)
    }
}

/// Decodes the text where it lies: input of megabytes is not copied for it.
struct BlobVisitor;

impl Visitor<'_> for BlobVisitor {
    type Value = Blob;

    fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("base64")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Blob, E> {
        STANDARD.decode(text).map(Blob).map_err(E::custom)
    }
}

/// What the host asks for.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Request {
    /// Once: the template's environment, where commands are run, and its long-lived one unless `argv` is empty.
    Start { argv: Vec<String>, env: Env, cwd: String },
    /// Become another machine than the one this was forked from.
    Identity(Identity),
    /// Run a command to its end.
    Exec(ExecRequest),
    /// Kill a command's process group; its `exit` follows as after any other end.
    Cancel { id: String },
    /// Further input of a command whose input is open; `end`: there is none after it.
    Stdin { id: String, data: Blob, end: bool },
    /// A terminal's size has changed.
    Resize { id: String, rows: u16, cols: u16 },
    /// From now on this much of a command's output may be told: see `Flow`.
    Grant { id: String, granted: u64, waits: bool },
    /// Tell once more what is kept of a command's output; ends with a `replayed`.
    Replay { id: String },
    /// Answered by a `pong` with the same nonce.
    Ping { nonce: String },
    /// Answered by `running`.
    List,
    /// The wall clock, nanoseconds since 1970: sent to a machine that stood still.
    Clock { unix_ns: i64 },
    /// Stop the workload, for a stop of the whole machine in which a child must find it so; answered by `frozen` with
    /// the same nonce.
    Freeze { nonce: String },
    /// Let the workload go on, also where it was not stopped; answered by `thawed` with the same nonce.
    Thaw { nonce: String },
    /// Ask a server of the workload over loopback; answered by `http_status` with the same nonce.
    HttpGet(HttpGetRequest),
}

/// A request to 127.0.0.1 of which only the status is of interest.
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub struct HttpGetRequest {
    pub nonce: String,
    pub port: u16,
    /// Path and query, as they are sent.
    pub path: String,
    pub timeout_ms: u64,
}

/// Who this machine is from now on.
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub struct Identity {
    pub generation: String,
    pub hostname: String,
    /// Wall clock, nanoseconds since 1970.
    pub unix_ns: i64,
    pub entropy: Blob,
    pub env: Env,
}

/// A command, given to execve as it is.
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub struct ExecRequest {
    pub id: String,
    pub generation: String,
    pub argv: Vec<String>,
    pub env: Env,
    pub cwd: Option<String>,
    pub stdin: Option<Blob>,
    pub timeout_ms: u64,
    /// For both streams together; what goes beyond is read and dropped. Not where there is a `flow`.
    pub output_limit: usize,
    /// Its input is what `stdin` frames bring, until their end, in place of `stdin`.
    pub stdin_open: bool,
    /// It runs on a terminal of its own, and all of its output is `stdout`.
    pub terminal: Option<TerminalSize>,
    /// None: its output is told as it comes, and none of it is kept.
    pub flow: Option<Flow>,
}

/// Of a terminal, in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct TerminalSize {
    pub rows: u16,
    pub cols: u16,
}

/// How a command's output is told to a host that does not take everything at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct Flow {
    /// How much output of both streams may be told, counted from the command's begin; from this machine's birth and
    /// from each `list` it is counted anew.
    pub granted: u64,
    /// What is beyond: the command waits with it, or else it is read and not told.
    pub waits: bool,
    /// How much of each stream's end is kept here, for a host that asks for it again.
    pub tail_bytes: usize,
}

/// Where output came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stream {
    Stdout,
    Stderr,
}

/// Why a command was not started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Refusal {
    /// The request itself makes no sense.
    Invalid,
    /// It was meant for another machine than this one is by now.
    WrongGeneration,
    /// As many commands run already as may run at once, or no process can be made.
    TooMany,
    BadCwd,
    NotFound,
    NotExecutable,
    Internal,
}

/// What the guest tells. Commands' frames carry the generation of the machine that sends them: a command that goes on
/// in a forked machine is told of under the new one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Report {
    Booted {
        protocol: u32,
    },
    /// `pid` is null if there was no command to start.
    Started {
        pid: Option<i32>,
    },
    StartFailed {
        message: String,
    },
    Identified {
        generation: String,
    },
    IdentityFailed {
        generation: String,
        message: String,
    },
    /// A command with a `flow` has become its program.
    Begun {
        generation: String,
        id: String,
    },
    /// `offset`: what its stream had before it.
    Output {
        generation: String,
        id: String,
        stream: Stream,
        offset: u64,
        data: Blob,
    },
    /// So much of what `stdin` frames brought is with the command. Not `open`: it takes no more.
    StdinTaken {
        generation: String,
        id: String,
        bytes: u64,
        open: bool,
    },
    /// What was kept of a command is told. `stdin_bytes`: what `stdin` frames have brought so far.
    Replayed {
        generation: String,
        id: String,
        stdin_bytes: u64,
        stdin_open: bool,
    },
    Exit {
        generation: String,
        id: String,
        /// The exit code, 128 + signal where one killed the process, -1 after a time-out.
        code: i32,
        timed_out: bool,
        signal: Option<i32>,
        truncated: bool,
    },
    ExecFailed {
        generation: String,
        id: String,
        code: Refusal,
        message: String,
    },
    WorkloadExit {
        generation: String,
        code: i32,
        signal: Option<i32>,
    },
    Pong {
        nonce: String,
    },
    /// The commands that run: said before each `identified`, and when asked. When asked also those of this machine
    /// that have ended and are remembered; the `exit` of each follows.
    Running {
        generation: String,
        ids: Vec<String>,
    },
    /// Exactly one of `status` and `message`: the server's status code, or why there is none.
    HttpStatus {
        nonce: String,
        status: Option<u16>,
        message: Option<String>,
    },
    /// Nothing of the workload runs; or, with a `message` that says why not, all of it runs on.
    Frozen {
        nonce: String,
        message: Option<String>,
    },
    /// The workload goes on; or, with a `message`, it may not.
    Thawed {
        nonce: String,
        message: Option<String>,
    },
}

impl Request {
    /// None for anything that is no request: the rest of a line that a fork cut, or noise.
    pub fn decode(line: &[u8]) -> Option<Request> {
        serde_json::from_slice(line).ok()
    }
}

impl Report {
    /// The frame with its newline.
    pub fn encode(&self) -> Vec<u8> {
        // Cannot fail: every key is a string, and writing into a Vec has no errors.
        let mut line = serde_json::to_vec(self).unwrap_or_default();
        line.push(b'\n');
        line
    }
}

/// Cuts a stream of bytes into lines.
#[derive(Default)]
pub struct Lines {
    partial: Vec<u8>,
    overlong: bool,
}

impl Lines {
    /// The lines that `chunk` completes, without their newlines. Empty and overlong lines are left out.
    pub fn feed(&mut self, chunk: &[u8]) -> Vec<Vec<u8>> {
        let mut complete = Vec::new();
        let mut rest = chunk;
        while let Some(end) = memchr::memchr(b'\n', rest) {
            self.append(&rest[..end]);
            rest = &rest[end + 1..];
            let line = std::mem::take(&mut self.partial);
            if !std::mem::take(&mut self.overlong) && !line.is_empty() {
                complete.push(line);
            }
        }
        self.append(rest);
        complete
    }

    fn append(&mut self, piece: &[u8]) {
        if self.overlong || self.partial.len() + piece.len() > MAX_LINE_BYTES {
            self.overlong = true;
            self.partial = Vec::new(); // Gives the memory back too.
        } else {
            self.partial.extend_from_slice(piece);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../tests/golden/guest_frames.jsonl");

    #[derive(Deserialize)]
    struct GoldenLine {
        to: String,
        line: String,
    }

    fn golden(to: &str) -> Vec<String> {
        let text = std::fs::read_to_string(GOLDEN).expect("the golden file");
        let lines = text.lines().map(|line| serde_json::from_str::<GoldenLine>(line).expect("a golden line"));
        lines.filter(|golden| golden.to == to).map(|golden| golden.line).collect()
    }

    fn env(pairs: &[(&str, &str)]) -> Env {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn strings(items: &[&str]) -> Vec<String> {
        items.iter().map(|item| (*item).to_owned()).collect()
    }

    const GENERATION: &str = "6f1c2d3e-4a5b-4c6d-8e7f-901a2b3c4d5e";

    #[test]
    fn requests_are_read_as_the_host_writes_them() {
        let expected = vec![
            Request::Start {
                argv: strings(&["/bin/server", "--flag"]),
                env: env(&[("LEVEL", "3")]),
                cwd: "/app".to_owned(),
            },
            Request::Start { argv: vec![], env: Env::new(), cwd: "/".to_owned() },
            Request::Identity(Identity {
                generation: GENERATION.to_owned(),
                hostname: "cart-0-1a2b3".to_owned(),
                unix_ns: 1_767_225_600_123_456_789,
                entropy: Blob((0..32).collect()),
                env: env(&[("FORKTREE_SEED", "7"), ("NOTE", "naïve \"quoted\"\n\u{1f333}")]),
            }),
            Request::Exec(ExecRequest {
                id: "a1".to_owned(),
                generation: GENERATION.to_owned(),
                argv: strings(&["sh", "-c", "echo \"$X\" | tr a b"]),
                env: env(&[("X", "1")]),
                cwd: Some("/srv".to_owned()),
                stdin: Some(Blob(vec![0, 10, 255])),
                timeout_ms: 1500,
                output_limit: 65536,
                stdin_open: false,
                terminal: None,
                flow: None,
            }),
            Request::Exec(ExecRequest {
                id: "a2".to_owned(),
                generation: NIL_GENERATION.to_owned(),
                argv: strings(&["true"]),
                env: Env::new(),
                cwd: None,
                stdin: None,
                timeout_ms: 1,
                output_limit: 0,
                stdin_open: true,
                terminal: Some(TerminalSize { rows: 24, cols: 80 }),
                flow: Some(Flow { granted: 1 << 40, waits: true, tail_bytes: 65536 }),
            }),
            Request::Cancel { id: "a1".to_owned() },
            Request::Stdin { id: "a1".to_owned(), data: Blob(b"hi\n".to_vec()), end: false },
            Request::Stdin { id: "a1".to_owned(), data: Blob(vec![]), end: true },
            Request::Resize { id: "a1".to_owned(), rows: 50, cols: 132 },
            Request::Grant { id: "a1".to_owned(), granted: 262_144, waits: false },
            Request::Replay { id: "a1".to_owned() },
            Request::Ping { nonce: "n1".to_owned() },
            Request::List,
            Request::Clock { unix_ns: 1_767_225_600_123_456_789 },
            Request::Freeze { nonce: "n3".to_owned() },
            Request::Thaw { nonce: "n4".to_owned() },
            Request::HttpGet(HttpGetRequest {
                nonce: "n2".to_owned(),
                port: 8000,
                path: "/ready?deep=1".to_owned(),
                timeout_ms: 5000,
            }),
        ];
        let decoded: Vec<_> = golden("guest").iter().map(|line| Request::decode(line.as_bytes())).collect();
        assert_eq!(decoded, expected.into_iter().map(Some).collect::<Vec<_>>());
    }

    #[test]
    fn reports_are_written_as_the_host_reads_them() {
        let (generation, id) = (|| GENERATION.to_owned(), || "a1".to_owned());
        let refused = |code| Report::ExecFailed { generation: generation(), id: id(), code, message: "why".to_owned() };
        let reports = vec![
            Report::Booted { protocol: PROTOCOL },
            Report::Started { pid: Some(42) },
            Report::Started { pid: None },
            Report::StartFailed { message: "not found: \"/bin/server\"".to_owned() },
            Report::Identified { generation: generation() },
            Report::IdentityFailed { generation: generation(), message: "not frozen".to_owned() },
            Report::Begun { generation: generation(), id: id() },
            Report::Output {
                generation: generation(),
                id: id(),
                stream: Stream::Stdout,
                offset: 0,
                data: Blob(b"hi\n".to_vec()),
            },
            Report::Output {
                generation: generation(),
                id: id(),
                stream: Stream::Stderr,
                offset: 1 << 40,
                data: Blob(vec![255, 0]),
            },
            Report::StdinTaken { generation: generation(), id: id(), bytes: 3, open: true },
            Report::Replayed { generation: generation(), id: id(), stdin_bytes: 3, stdin_open: false },
            Report::Exit {
                generation: generation(),
                id: id(),
                code: 3,
                timed_out: false,
                signal: None,
                truncated: false,
            },
            Report::Exit {
                generation: generation(),
                id: id(),
                code: -1,
                timed_out: true,
                signal: Some(9),
                truncated: true,
            },
            refused(Refusal::Invalid),
            refused(Refusal::WrongGeneration),
            refused(Refusal::TooMany),
            refused(Refusal::BadCwd),
            refused(Refusal::NotFound),
            refused(Refusal::NotExecutable),
            refused(Refusal::Internal),
            Report::WorkloadExit { generation: NIL_GENERATION.to_owned(), code: 137, signal: Some(9) },
            Report::Pong { nonce: "n1".to_owned() },
            Report::Running { generation: generation(), ids: strings(&["a1", "a2"]) },
            Report::HttpStatus { nonce: "n2".to_owned(), status: Some(200), message: None },
            Report::HttpStatus { nonce: "n2".to_owned(), status: None, message: Some("refused".to_owned()) },
            Report::Frozen { nonce: "n3".to_owned(), message: None },
            Report::Frozen { nonce: "n3".to_owned(), message: Some("timed out".to_owned()) },
            Report::Thawed { nonce: "n4".to_owned(), message: None },
            Report::Thawed { nonce: "n4".to_owned(), message: Some("no such file".to_owned()) },
        ];
        let encoded: Vec<_> = reports.iter().map(|report| String::from_utf8(report.encode()).expect("UTF-8")).collect();
        assert_eq!(encoded, golden("host").iter().map(|line| format!("{line}\n")).collect::<Vec<_>>());
    }

    #[test]
    fn a_frame_to_the_host_has_no_tail_that_is_a_frame_too() {
        for line in golden("host") {
            for (at, _) in line.char_indices().skip(1) {
                let tail = serde_json::from_str::<serde_json::Value>(&line[at..]);
                assert!(!matches!(tail, Ok(serde_json::Value::Object(_))), "{}", &line[at..]);
            }
        }
    }

    #[test]
    fn noise_is_no_request() {
        let table: [&[u8]; 10] = [
            b"",
            b"null",
            b"[]",
            b"{}",
            b"{\"type\":\"reboot\"}",
            b"{\"type\":\"ping\"}",
            b"{\"type\":\"ping\",\"nonce\":1}",
            b"\xff\xfe\x00",
            b"\"gen\":\"x\"}",
            b"{\"type\":\"start\",\"argv\":[\"\\ud800\"],\"env\":{}}",
        ];
        for line in table {
            assert_eq!(Request::decode(line), None, "{}", String::from_utf8_lossy(line));
        }
    }

    #[test]
    fn deeply_nested_noise_does_not_exhaust_the_stack() {
        assert_eq!(Request::decode("[".repeat(1 << 20).as_bytes()), None);
        assert_eq!(Request::decode(format!("{{\"type\":{}", "[".repeat(1 << 20)).as_bytes()), None);
    }

    #[test]
    fn lines_come_out_the_same_however_the_stream_is_cut() {
        let stream = b"\nfirst\n\n\nsecond line\nrest of a cut frame";
        let whole = Lines::default().feed(stream);
        assert_eq!(whole, vec![b"first".to_vec(), b"second line".to_vec()]);
        for first in 0..=stream.len() {
            for second in first..=stream.len() {
                let mut lines = Lines::default();
                let mut got = lines.feed(&stream[..first]);
                got.extend(lines.feed(&stream[first..second]));
                got.extend(lines.feed(&stream[second..]));
                assert_eq!(got, whole, "cut at {first} and {second}");
            }
        }
    }

    #[test]
    fn an_overlong_line_is_dropped_and_the_next_one_is_read() {
        let mut lines = Lines::default();
        let chunk = vec![b'x'; 1 << 20];
        for _ in 0..30 {
            assert!(lines.feed(&chunk).is_empty());
            assert!(lines.partial.len() <= MAX_LINE_BYTES);
        }
        assert!(lines.feed(b"tail\n").is_empty());
        assert_eq!(lines.feed(b"next\n"), vec![b"next".to_vec()]);
    }

    #[test]
    fn the_longest_line_allowed_is_read() {
        let mut lines = Lines::default();
        let mut line = vec![b'x'; MAX_LINE_BYTES];
        line.push(b'\n');
        assert_eq!(lines.feed(&line)[0].len(), MAX_LINE_BYTES);
        assert!(lines.feed(&[vec![b'x'; MAX_LINE_BYTES + 1], b"\n".to_vec()].concat()).is_empty());
    }

    proptest! {
        #[test]
        fn whatever_is_sent_breaks_nothing(line in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Request::decode(&line);
        }

        #[test]
        fn a_frame_that_was_changed_anywhere_breaks_nothing(
            which in any::<proptest::sample::Index>(),
            at in any::<proptest::sample::Index>(),
            with in proptest::collection::vec(any::<u8>(), 0..20),
            cut in 0_usize..40,
        ) {
            let golden = golden("guest");
            let mut line = golden[which.index(golden.len())].clone().into_bytes();
            let at = at.index(line.len());
            let end = line.len().min(at + cut);
            line.splice(at..end, with);
            let _ = Request::decode(&line);
        }

        #[test]
        fn lines_of_any_stream_are_those_between_its_newlines(
            stream in proptest::collection::vec(prop_oneof![Just(b'\n'), Just(b'x'), any::<u8>()], 0..400),
            cuts in proptest::collection::vec(0_usize..400, 0..8),
        ) {
            let mut cuts: Vec<_> = cuts.into_iter().map(|cut| cut.min(stream.len())).collect();
            cuts.sort_unstable();
            cuts.push(stream.len());
            let (mut lines, mut got, mut from) = (Lines::default(), Vec::new(), 0);
            for cut in cuts {
                got.extend(lines.feed(&stream[from..cut]));
                from = cut;
            }
            let mut expected: Vec<_> = stream.split(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect();
            expected.pop(); // What has no newline yet.
            expected.retain(|line| !line.is_empty());
            prop_assert_eq!(got, expected);
        }
    }
}
