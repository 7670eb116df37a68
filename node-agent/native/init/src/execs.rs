//! The commands that run for the host: their output, their time limits and their ends.

use crate::frames::{Blob, Env, ExecRequest, Refusal, Report, Stream};
use crate::port::Port;
use crate::process::{Launch, Program, Refused, Streams, Verdict};
use crate::sys;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::unix::io::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

/// How many may run at once. Three descriptors each, within the start value of the limit on open files.
const MAX_RUNNING: usize = 128;

/// How many pipes of ended commands are still emptied for the processes they left behind.
const MAX_ORPHANS: usize = 256;

/// Output travels in frames of this much, before base64: the driver takes such a frame whole.
const CHUNK_BYTES: usize = 16 << 10;

/// No process can run longer than this: a year, so that adding it to a clock cannot overflow.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// One thing of ours to be polled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    Launch(libc::pid_t),
    Output(libc::pid_t, Stream),
    Orphan(RawFd),
}

/// Our end of a command's output.
struct Pipe {
    reader: OwnedFd,
    /// Once the command has ended: how much of what it wrote is still unread. What comes after that is not its own.
    tail_bytes: Option<usize>,
}

struct Exec {
    id: String,
    generation: String,
    program: Program,
    /// None once it is known to run.
    launch: Option<Launch>,
    refused: Option<Refused>,
    stdout: Option<Pipe>,
    stderr: Option<Pipe>,
    /// None once it was killed for it.
    deadline: Option<Instant>,
    timed_out: bool,
    output_left: usize,
    truncated: bool,
    status: Option<libc::c_int>,
}

/// All of them.
#[derive(Default)]
pub struct Execs {
    running: BTreeMap<libc::pid_t, Exec>,
    orphans: VecDeque<OwnedFd>,
}

/// How a process ended: exit code, or 128 + signal, and the signal.
pub fn ending(status: libc::c_int) -> (i32, Option<i32>) {
    if libc::WIFSIGNALED(status) {
        let signal = libc::WTERMSIG(status);
        return (128 + signal, Some(signal));
    }
    (libc::WEXITSTATUS(status), None)
}

impl Execs {
    /// Start a command with `env`, its whole environment.
    pub fn start(&mut self, request: ExecRequest, env: &Env, group: BorrowedFd<'_>) -> Result<(), Refused> {
        if self.running.len() >= MAX_RUNNING {
            return Err(Refused::new(Refusal::TooMany, format!("{MAX_RUNNING} commands run already")));
        }
        if self.running.values().any(|exec| exec.id == request.id) {
            return Err(Refused::new(Refusal::Invalid, "a command with this id runs already"));
        }
        let failed = |error: io::Error| Refused::new(Refusal::Internal, format!("no streams can be made: {error}"));
        let mut program = Program::new(&request.argv, env, request.cwd.as_deref())?;
        let stdin = match &request.stdin {
            Some(content) => sys::memory_file(&content.0).map_err(failed)?,
            None => std::fs::File::open("/dev/null").map_err(failed)?.into(),
        };
        let (stdout, stdout_writer) = sys::pipe().map_err(failed)?;
        let (stderr, stderr_writer) = sys::pipe().map_err(failed)?;
        let streams = Streams { stdin: stdin.as_fd(), stdout: stdout_writer.as_fd(), stderr: stderr_writer.as_fd() };
        let (pid, launch) = program.launch(&streams, group)?;
        let exec = Exec {
            id: request.id,
            generation: request.generation,
            program,
            launch: Some(launch),
            refused: None,
            stdout: Some(Pipe { reader: stdout, tail_bytes: None }),
            stderr: Some(Pipe { reader: stderr, tail_bytes: None }),
            deadline: Some(Instant::now() + Duration::from_millis(request.timeout_ms).min(LONGEST)),
            timed_out: false,
            output_left: request.output_limit,
            truncated: false,
            status: None,
        };
        self.running.insert(pid, exec);
        Ok(())
    }

    /// Kill the command with this id, if there is one.
    pub fn cancel(&mut self, id: &str) {
        for (pid, exec) in &self.running {
            if exec.id == id && exec.status.is_none() {
                sys::kill_group(*pid);
            }
        }
    }

    /// Kill what has run out of time.
    pub fn expire(&mut self, now: Instant) {
        for (pid, exec) in &mut self.running {
            if exec.status.is_none() && matches!(exec.deadline, Some(deadline) if deadline <= now) {
                exec.deadline = None;
                exec.timed_out = true;
                sys::kill_group(*pid);
            }
        }
    }

    /// When `expire` has to be called next.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.running.values().filter(|exec| exec.status.is_none()).filter_map(|exec| exec.deadline).min()
    }

    /// This is another machine now. What runs goes on in the parent and here, and is told of in both.
    pub fn carry_on(&mut self, generation: &str) {
        for exec in self.running.values_mut() {
            generation.clone_into(&mut exec.generation);
        }
    }

    /// Those that are not told to have ended.
    pub fn ids(&self) -> Vec<String> {
        self.running.values().map(|exec| exec.id.clone()).collect()
    }

    /// What to poll for reading.
    pub fn sources(&self, port_takes_output: bool) -> Vec<(RawFd, Source)> {
        let mut sources = Vec::new();
        for (pid, exec) in &self.running {
            if let Some(launch) = &exec.launch {
                sources.push((launch.as_raw_fd(), Source::Launch(*pid)));
            }
            if !port_takes_output {
                continue; // The pipes fill up and the command waits.
            }
            for (pipe, stream) in [(&exec.stdout, Stream::Stdout), (&exec.stderr, Stream::Stderr)] {
                if let Some(pipe) = pipe {
                    sources.push((pipe.reader.as_raw_fd(), Source::Output(*pid, stream)));
                }
            }
        }
        sources.extend(self.orphans.iter().map(|orphan| (orphan.as_raw_fd(), Source::Orphan(orphan.as_raw_fd()))));
        sources
    }

    /// Take what `source` has to tell.
    pub fn readable(&mut self, source: Source, port: &mut Port) {
        match source {
            Source::Launch(pid) => {
                if let Some(exec) = self.running.get_mut(&pid) {
                    exec.learn_verdict();
                }
            }
            Source::Output(pid, stream) => {
                if let Some(exec) = self.running.get_mut(&pid) {
                    exec.read(stream, port);
                }
            }
            Source::Orphan(fd) => self.orphans.retain(|orphan| {
                let is_open = || matches!(sys::read_available(orphan, &mut [0; CHUNK_BYTES]), Ok(None | Some(1..)));
                orphan.as_raw_fd() != fd || is_open()
            }),
        }
    }

    /// Note that a process ended; false if it is none of these.
    pub fn reaped(&mut self, pid: libc::pid_t, status: libc::c_int) -> bool {
        let exec = match self.running.get_mut(&pid) {
            Some(exec) => exec,
            None => return false,
        };
        exec.learn_verdict();
        exec.take_verdict(); // Also where another process holds the pipe open.
        exec.status = Some(status);
        for pipe in [&mut exec.stdout, &mut exec.stderr].into_iter().flatten() {
            pipe.tail_bytes = Some(sys::waiting_bytes(&pipe.reader));
        }
        true
    }

    /// Report every command that has ended and whose output is sent.
    pub fn settle(&mut self, port: &mut Port) {
        let is_done =
            |exec: &Exec| exec.status.is_some() && exec.stdout_and_stderr().all(|pipe| pipe.tail_bytes == Some(0));
        let done: Vec<_> = self.running.iter().filter(|(_, exec)| is_done(exec)).map(|(pid, _)| *pid).collect();
        for pid in done {
            if let Some(exec) = self.running.remove(&pid) {
                self.finish(exec, port);
            }
        }
    }

    fn finish(&mut self, exec: Exec, port: &mut Port) {
        port.send(&exec.report());
        // Whoever still holds the other ends runs in the background and must not die of a closed pipe.
        self.orphans.extend(exec.stdout.into_iter().chain(exec.stderr).map(|pipe| pipe.reader));
        while self.orphans.len() > MAX_ORPHANS {
            self.orphans.pop_front();
        }
    }
}

impl Exec {
    fn stdout_and_stderr(&self) -> impl Iterator<Item = &Pipe> {
        self.stdout.iter().chain(&self.stderr)
    }

    fn learn_verdict(&mut self) {
        let verdict = self.launch.as_mut().map(|launch| launch.verdict(&self.program));
        self.note(verdict);
    }

    /// Of one that has ended.
    fn take_verdict(&mut self) {
        let verdict = self.launch.as_ref().map(|launch| launch.ended(&self.program));
        self.note(verdict);
    }

    fn note(&mut self, verdict: Option<Verdict>) {
        match verdict {
            None | Some(Verdict::Pending) => (),
            Some(Verdict::Running) => self.launch = None,
            Some(Verdict::Refused(refused)) => {
                self.launch = None;
                self.refused = Some(refused);
            }
        }
    }

    fn read(&mut self, stream: Stream, port: &mut Port) {
        let slot = match stream {
            Stream::Stdout => &mut self.stdout,
            Stream::Stderr => &mut self.stderr,
        };
        let pipe = match slot {
            Some(pipe) => pipe,
            None => return,
        };
        let mut buffer = [0; CHUNK_BYTES];
        let room = pipe.tail_bytes.map_or(CHUNK_BYTES, |tail| tail.min(CHUNK_BYTES));
        match sys::read_available(&pipe.reader, &mut buffer[..room]) {
            Ok(None) => (),
            Ok(Some(count)) if count > 0 => {
                pipe.tail_bytes = pipe.tail_bytes.map(|tail| tail - count);
                self.forward(stream, &buffer[..count], port);
            }
            // The end, or an error that leaves nothing more to read. With no room there is nothing left to wait for
            // either, and `settle` has seen that already.
            _ if room > 0 => *slot = None,
            _ => (),
        }
    }

    fn forward(&mut self, stream: Stream, output: &[u8], port: &mut Port) {
        let kept = output.len().min(self.output_left);
        self.output_left -= kept;
        self.truncated |= kept < output.len();
        if kept > 0 {
            let data = Blob(output[..kept].to_vec());
            port.send(&Report::Output { generation: self.generation.clone(), id: self.id.clone(), stream, data });
        }
    }

    fn report(&self) -> Report {
        let (generation, id) = (self.generation.clone(), self.id.clone());
        if let Some(Refused { code, message }) = &self.refused {
            return Report::ExecFailed { generation, id, code: *code, message: message.clone() };
        }
        let (code, signal) = ending(self.status.unwrap_or_default());
        let code = if self.timed_out { -1 } else { code };
        Report::Exit { generation, id, code, timed_out: self.timed_out, signal, truncated: self.truncated }
    }
}
