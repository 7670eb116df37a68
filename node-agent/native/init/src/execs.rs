//! The commands that run for the host: their output, their time limits and their ends.

use crate::frames::{Blob, Env, ExecRequest, Refusal, Report, Stream, TerminalSize};
use crate::input::Input;
use crate::output::{Output, CHUNK_BYTES};
use crate::port::Port;
use crate::process::{Launch, Program, Refused, Streams, Verdict};
use crate::remembered::Remembered;
use crate::sys;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::unix::io::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

/// How many may run at once. Four descriptors each, within the start value of the limit on open files.
const MAX_RUNNING: usize = 128;

/// How many pipes of ended commands are still emptied for the processes they left behind.
const MAX_ORPHANS: usize = 256;

/// No process can run longer than this: a year, so that adding it to a clock cannot overflow.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// What a command wrote to its terminal gets to our end of it within this time after its own end. Nothing says when
/// that is all of it: a process that it left behind may write on.
const TERMINAL_DRAIN: Duration = Duration::from_millis(200);

/// One thing of ours to be polled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    Launch(libc::pid_t),
    Output(libc::pid_t, Stream),
    Input(libc::pid_t),
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
    output: Output,
    input: Option<Input>,
    on_terminal: bool,
    /// It was a host's own, which is not there any more. Nobody is told of it.
    abandoned: bool,
    /// None once it was killed for it.
    deadline: Option<Instant>,
    timed_out: bool,
    status: Option<libc::c_int>,
    /// Of one on a terminal that has ended: when its output counts as read.
    drained_at: Option<Instant>,
}

/// All of them.
#[derive(Default)]
pub struct Execs {
    running: BTreeMap<libc::pid_t, Exec>,
    ended: Remembered,
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

/// Both ends of what a command reads and writes: the command's, which it alone must hold, and ours.
struct Ends {
    stdin: OwnedFd,
    stdout: OwnedFd,
    /// None: it is where `stdout` is.
    stderr: Option<OwnedFd>,
    from_stdout: OwnedFd,
    from_stderr: Option<OwnedFd>,
    input: Option<Input>,
}

impl Ends {
    fn new(request: &ExecRequest) -> io::Result<Self> {
        if let Some(size) = request.terminal {
            return Self::terminal(size);
        }
        let (stdin, input) = match &request.stdin {
            _ if request.stdin_open => {
                let (reader, writer) = sys::input_pipe()?;
                (reader, Some(Input::new(writer, false)))
            }
            Some(content) => (sys::memory_file(&content.0)?, None),
            None => (std::fs::File::open("/dev/null")?.into(), None),
        };
        let (from_stdout, stdout) = sys::pipe()?;
        let (from_stderr, stderr) = sys::pipe()?;
        Ok(Self { stdin, stdout, stderr: Some(stderr), from_stdout, from_stderr: Some(from_stderr), input })
    }

    fn terminal(size: TerminalSize) -> io::Result<Self> {
        let (ours, theirs) = sys::terminal(size)?;
        let input = Some(Input::new(ours.try_clone()?, true));
        let stdin = theirs.try_clone()?;
        Ok(Self { stdin, stdout: theirs, stderr: None, from_stdout: ours, from_stderr: None, input })
    }
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
        let ends = Ends::new(&request).map_err(failed)?;
        let (stdout, on_terminal) = (ends.stdout.as_fd(), request.terminal.is_some());
        let stderr = ends.stderr.as_ref().map_or(stdout, OwnedFd::as_fd);
        let streams = Streams { stdin: ends.stdin.as_fd(), stdout, stderr, is_terminal: on_terminal };
        let (pid, launch) = program.launch(&streams, group)?;
        self.ended.forget(&request.id);
        let exec = Exec {
            id: request.id,
            generation: request.generation,
            program,
            launch: Some(launch),
            refused: None,
            stdout: Some(Pipe { reader: ends.from_stdout, tail_bytes: None }),
            stderr: ends.from_stderr.map(|reader| Pipe { reader, tail_bytes: None }),
            output: Output::new(request.output_limit, request.flow),
            input: ends.input,
            on_terminal,
            abandoned: false,
            deadline: Some(Instant::now() + Duration::from_millis(request.timeout_ms).min(LONGEST)),
            timed_out: false,
            status: None,
            drained_at: None,
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

    fn find(&mut self, id: &str) -> Option<&mut Exec> {
        self.running.values_mut().find(|exec| exec.id == id)
    }

    /// Input for a command. Of one that is gone the host hears otherwise.
    pub fn feed(&mut self, id: &str, data: &Blob, end: bool, port: &mut Port) {
        if let Some(exec) = self.find(id) {
            if let Some(input) = &mut exec.input {
                input.feed(&data.0, end);
            }
            exec.tell_input(port);
        }
    }

    /// A terminal has another size now.
    pub fn resize(&mut self, id: &str, size: TerminalSize) {
        let input = self.find(id).and_then(|exec| exec.input.as_ref());
        if let Some(terminal) = input.and_then(Input::terminal) {
            // Fails only for what is no terminal any more.
            let _ = sys::set_terminal_size(terminal, size);
        }
    }

    /// How much of a command's output may be told from now on.
    pub fn grant(&mut self, id: &str, granted: u64, waits: bool) {
        if let Some(exec) = self.find(id) {
            exec.output.grant(granted, waits);
        }
    }

    /// Tell what is kept of a command's output.
    pub fn replay(&mut self, id: &str, generation: &str, port: &mut Port) {
        let (mut stdin_bytes, mut stdin_open) = (0, false);
        if let Some(exec) = self.find(id) {
            exec.output.replay((&exec.generation, &exec.id), port);
            if let Some(input) = &exec.input {
                (stdin_bytes, stdin_open) = (input.received(), input.taken().1);
            }
        } else {
            self.ended.replay(generation, id, port);
        }
        port.send(&Report::Replayed { generation: generation.to_owned(), id: id.to_owned(), stdin_bytes, stdin_open });
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

    /// When `expire` and `settle` have to be called next.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.running
            .values()
            .filter_map(|exec| if exec.status.is_none() { exec.deadline } else { exec.drained_at })
            .min()
    }

    /// This is another machine now. What runs goes on in the parent and here, and is told of in both.
    pub fn carry_on(&mut self, generation: &str) {
        for exec in self.running.values_mut() {
            generation.clone_into(&mut exec.generation);
            exec.let_go();
        }
    }

    /// Another host asks than the one that granted.
    pub fn let_go(&mut self) {
        for exec in self.running.values_mut() {
            exec.let_go();
        }
    }

    /// Those that are not told to have ended.
    pub fn ids(&self) -> Vec<String> {
        self.running.values().filter(|exec| !exec.abandoned).map(|exec| exec.id.clone()).collect()
    }

    /// Those that have ended, and of which the host may not have heard.
    pub fn ended(&self) -> &Remembered {
        &self.ended
    }

    /// What to poll, and for which events.
    pub fn sources(&self, port_takes_output: bool) -> Vec<(RawFd, libc::c_short, Source)> {
        let mut sources = Vec::new();
        for (pid, exec) in &self.running {
            if let Some(launch) = &exec.launch {
                sources.push((launch.as_raw_fd(), libc::POLLIN, Source::Launch(*pid)));
            }
            if let Some(input) = exec.input.as_ref().and_then(Input::wanted) {
                sources.push((input, libc::POLLOUT, Source::Input(*pid)));
            }
            if !port_takes_output || exec.output.room() == 0 {
                continue; // The pipes fill up and the command waits.
            }
            for (pipe, stream) in [(&exec.stdout, Stream::Stdout), (&exec.stderr, Stream::Stderr)] {
                if let Some(pipe) = pipe {
                    sources.push((pipe.reader.as_raw_fd(), libc::POLLIN, Source::Output(*pid, stream)));
                }
            }
        }
        let orphans = self.orphans.iter().map(AsRawFd::as_raw_fd);
        sources.extend(orphans.map(|orphan| (orphan, libc::POLLIN, Source::Orphan(orphan))));
        sources
    }

    /// Take what `source` has to tell.
    pub fn ready(&mut self, source: Source, port: &mut Port) {
        match source {
            Source::Launch(pid) => {
                if let Some(exec) = self.running.get_mut(&pid) {
                    exec.learn_verdict(port);
                }
            }
            Source::Output(pid, stream) => {
                let kept_by = self.running.values().filter(|exec| exec.output.is_kept()).count();
                if let Some(exec) = self.running.get_mut(&pid) {
                    exec.read(stream, kept_by, port);
                }
            }
            Source::Input(pid) => {
                if let Some(exec) = self.running.get_mut(&pid) {
                    if let Some(input) = &mut exec.input {
                        input.pump();
                    }
                    exec.tell_input(port);
                }
            }
            Source::Orphan(fd) => self.orphans.retain(|orphan| {
                let is_open = || matches!(sys::read_available(orphan, &mut [0; CHUNK_BYTES]), Ok(None | Some(1..)));
                orphan.as_raw_fd() != fd || is_open()
            }),
        }
    }

    /// Note that a process ended; false if it is none of these.
    pub fn reaped(&mut self, pid: libc::pid_t, status: libc::c_int, port: &mut Port) -> bool {
        let exec = match self.running.get_mut(&pid) {
            Some(exec) => exec,
            None => return false,
        };
        exec.learn_verdict(port);
        exec.take_verdict(); // Also where another process holds the pipe open.
        exec.status = Some(status);
        if let Some(input) = &mut exec.input {
            input.close();
        }
        if exec.on_terminal {
            exec.drained_at = Some(Instant::now() + TERMINAL_DRAIN);
            return true;
        }
        for pipe in [&mut exec.stdout, &mut exec.stderr].into_iter().flatten() {
            pipe.tail_bytes = Some(sys::waiting_bytes(&pipe.reader));
        }
        true
    }

    /// Report every command that has ended and whose output is sent.
    pub fn settle(&mut self, now: Instant, port: &mut Port) {
        let done: Vec<_> = self.running.iter().filter(|(_, exec)| exec.is_done(now)).map(|(pid, _)| *pid).collect();
        for pid in done {
            if let Some(exec) = self.running.remove(&pid) {
                self.finish(exec, port);
            }
        }
    }

    fn finish(&mut self, exec: Exec, port: &mut Port) {
        let report = exec.report();
        if !exec.abandoned {
            port.send(&report);
        }
        // Whoever still holds the other ends runs in the background and must not die of a closed pipe.
        self.orphans.extend(exec.stdout.into_iter().chain(exec.stderr).map(|pipe| pipe.reader));
        while self.orphans.len() > MAX_ORPHANS {
            self.orphans.pop_front();
        }
        if exec.output.is_kept() {
            self.ended.add(exec.generation, exec.id, report, exec.output);
        }
    }
}

impl Exec {
    fn is_done(&self, now: Instant) -> bool {
        let is_read = |pipe: &Pipe| pipe.tail_bytes == Some(0) || matches!(self.drained_at, Some(at) if at <= now);
        self.status.is_some() && self.stdout.iter().chain(&self.stderr).all(is_read)
    }

    fn learn_verdict(&mut self, port: &mut Port) {
        let verdict = self.launch.as_mut().map(|launch| launch.verdict(&self.program));
        let runs = verdict == Some(Verdict::Running);
        self.note(verdict);
        if runs && self.output.flows() {
            port.send(&Report::Begun { generation: self.generation.clone(), id: self.id.clone() });
        }
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

    /// Whoever began it is not there any more. A tool was theirs alone: it sees its input break off, takes back what it
    /// has begun, and ends.
    fn let_go(&mut self) {
        self.abandoned |= self.output.flows() && !self.output.is_kept();
        if self.abandoned {
            self.input = None;
            self.output.drop_all();
        } else {
            self.output.let_go();
        }
    }

    fn tell_input(&mut self, port: &mut Port) {
        let (bytes, open) = self.input.as_ref().map_or((0, false), Input::taken);
        let (generation, id) = (self.generation.clone(), self.id.clone());
        port.send(&Report::StdinTaken { generation, id, bytes, open });
    }

    fn read(&mut self, stream: Stream, kept_by: usize, port: &mut Port) {
        let slot = match stream {
            Stream::Stdout => &mut self.stdout,
            Stream::Stderr => &mut self.stderr,
        };
        let pipe = match slot {
            Some(pipe) => pipe,
            None => return,
        };
        let mut buffer = [0; CHUNK_BYTES];
        // The other stream may have taken what there was room for a moment ago.
        let room = pipe.tail_bytes.unwrap_or(CHUNK_BYTES).min(self.output.room());
        if room == 0 {
            return; // With no tail there is nothing left to wait for either, and `settle` has seen that already.
        }
        match sys::read_available(&pipe.reader, &mut buffer[..room]) {
            Ok(None) => (),
            Ok(Some(count)) if count > 0 => {
                pipe.tail_bytes = pipe.tail_bytes.map(|tail| tail - count);
                self.output.take((&self.generation, &self.id), stream, &buffer[..count], kept_by, port);
            }
            // The end, or an error that leaves nothing more to read: on a terminal the two are the same.
            _ => *slot = None,
        }
    }

    fn report(&self) -> Report {
        let (generation, id) = (self.generation.clone(), self.id.clone());
        if let Some(Refused { code, message }) = &self.refused {
            return Report::ExecFailed { generation, id, code: *code, message: message.clone() };
        }
        let (code, signal) = ending(self.status.unwrap_or_default());
        let code = if self.timed_out { -1 } else { code };
        Report::Exit { generation, id, code, timed_out: self.timed_out, signal, truncated: self.output.truncated }
    }
}
