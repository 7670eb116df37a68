//! The one loop: requests, ends of processes, output, time limits.

use crate::execs::{ending, Execs, Source};
use crate::frames::{Env, ExecRequest, Refusal, Report, Request, TerminalSize, PROTOCOL};
use crate::http_get::Gets;
use crate::identity::{Marks, Persona};
use crate::port::Port;
use crate::process::Refused;
use crate::sys;
use crate::workload::{Start, Workload};
use crate::workload_group::WorkloadGroup;
use std::io;
use std::os::unix::io::{AsRawFd, OwnedFd, RawFd};
use std::time::Instant;

/// What an event of poll belongs to.
#[derive(Clone, Copy)]
enum Origin {
    Port,
    Signals,
    WorkloadStart,
    WorkloadOutput,
    Exec(Source),
    HttpGet(RawFd),
}

/// Serves the host until the channel breaks.
pub struct Server {
    port: Port,
    signals: OwnedFd,
    group: WorkloadGroup,
    marks: Marks,
    persona: Persona,
    execs: Execs,
    gets: Gets,
    workload: Option<Workload>,
    /// Where commands are run that do not say where.
    folder: String,
    started: bool,
}

impl Server {
    pub fn new(port: Port, signals: OwnedFd, group: WorkloadGroup, marks: Marks, one_cpu: bool) -> Self {
        let (persona, execs, gets) = (Persona::new(one_cpu), Execs::default(), Gets::default());
        Self {
            port,
            signals,
            group,
            marks,
            persona,
            execs,
            gets,
            workload: None,
            folder: "/".to_owned(),
            started: false,
        }
    }

    /// Runs for as long as the machine does; returns only the error that ended it.
    pub fn serve(mut self) -> io::Error {
        self.port.send(&Report::Booted { protocol: PROTOCOL });
        loop {
            if let Err(error) = self.turn() {
                return error;
            }
        }
    }

    fn turn(&mut self) -> io::Result<()> {
        let now = Instant::now();
        self.execs.settle(now, &mut self.port);
        self.port.flush()?;
        let (mut polled, origins) = self.poll_set(now);
        let deadlines = [self.execs.next_deadline(), self.gets.next_deadline(), self.port.resumes(now)];
        let wake = deadlines.into_iter().flatten().min();
        sys::poll(&mut polled, wake.map(|at| at.saturating_duration_since(now)))?;
        // In order: the port comes first, so that an identity is taken on before anything else happens.
        for (entry, origin) in polled.iter().zip(origins) {
            if entry.revents != 0 {
                self.handle(origin)?;
            }
        }
        let now = Instant::now();
        self.execs.expire(now);
        self.gets.expire(now, &mut self.port);
        Ok(())
    }

    fn poll_set(&self, now: Instant) -> (Vec<libc::pollfd>, Vec<Origin>) {
        let mut sources: Vec<(RawFd, libc::c_short, Origin)> = Vec::new();
        let port_events = self.port.interest(now);
        if port_events != 0 {
            sources.push((self.port.as_raw_fd(), port_events, Origin::Port));
        }
        sources.push((self.signals.as_raw_fd(), libc::POLLIN, Origin::Signals));
        if let Some(workload) = &self.workload {
            let start = workload.launch_fd().map(|fd| (fd, libc::POLLIN, Origin::WorkloadStart));
            let output = workload.output_fd().map(|fd| (fd, libc::POLLIN, Origin::WorkloadOutput));
            sources.extend(start.into_iter().chain(output));
        }
        let execs = self.execs.sources(self.port.takes_output());
        sources.extend(execs.into_iter().map(|(fd, events, source)| (fd, events, Origin::Exec(source))));
        sources.extend(self.gets.sources().map(|(fd, events)| (fd, events, Origin::HttpGet(fd))));
        sources.into_iter().map(|(fd, events, origin)| (libc::pollfd { fd, events, revents: 0 }, origin)).unzip()
    }

    fn handle(&mut self, origin: Origin) -> io::Result<()> {
        match origin {
            Origin::Port => {
                for request in self.port.receive()? {
                    self.obey(request);
                }
            }
            Origin::Signals => self.reap(),
            Origin::WorkloadStart => self.report_start(),
            Origin::WorkloadOutput => {
                if let Some(workload) = &mut self.workload {
                    workload.log_output();
                }
            }
            Origin::Exec(source) => self.execs.ready(source, &mut self.port),
            Origin::HttpGet(fd) => self.gets.proceed(fd, &mut self.port),
        }
        Ok(())
    }

    fn obey(&mut self, request: Request) {
        match request {
            Request::Start { argv, env, cwd } => self.start(&argv, env, cwd),
            Request::Identity(identity) => {
                let generation = identity.generation.clone();
                let report = match self.persona.assume(identity, &mut self.group, &mut self.marks) {
                    Ok(()) => {
                        self.execs.carry_on(&generation);
                        self.tell_running(self.execs.ids()); // First, so that whoever knows of this machine knows of these.
                        Report::Identified { generation }
                    }
                    Err(message) => Report::IdentityFailed { generation, message },
                };
                self.port.send(&report);
            }
            Request::Exec(request) => self.exec(request),
            Request::Cancel { id } => self.execs.cancel(&id),
            Request::Stdin { id, data, end } => self.execs.feed(&id, &data, end, &mut self.port),
            Request::Resize { id, rows, cols } => self.execs.resize(&id, TerminalSize { rows, cols }),
            Request::Grant { id, granted, waits } => self.execs.grant(&id, granted, waits),
            Request::Replay { id } => self.execs.replay(&id, self.persona.generation(), &mut self.port),
            Request::Ping { nonce } => self.port.send(&Report::Pong { nonce }),
            Request::List => self.tell_all(),
            // PID 1 may do this; a clock that the kernel refuses to set is as wrong as it was.
            Request::Clock { unix_ns } => drop(sys::set_wall_clock(unix_ns)),
            Request::Freeze { nonce } => {
                let message = self.group.freeze().err().map(|error| error.to_string());
                self.port.send(&Report::Frozen { nonce, message });
            }
            Request::Thaw { nonce } => {
                let message = self.group.thaw().err().map(|error| error.to_string());
                self.port.send(&Report::Thawed { nonce, message });
            }
            Request::HttpGet(request) => self.gets.start(request, &mut self.port),
        }
    }

    fn tell_running(&mut self, ids: Vec<String>) {
        let generation = self.persona.generation().to_owned();
        self.port.send(&Report::Running { generation, ids });
    }

    /// For a host that was not there before.
    fn tell_all(&mut self) {
        self.execs.let_go();
        let mut ids = self.execs.ids();
        ids.extend(self.execs.ended().ids(self.persona.generation()).map(str::to_owned));
        self.tell_running(ids);
        self.execs.ended().tell(self.persona.generation(), &mut self.port);
    }

    fn start(&mut self, argv: &[String], env: Env, cwd: String) {
        if std::mem::replace(&mut self.started, true) {
            return self.port.send(&Report::StartFailed { message: "started already".to_owned() });
        }
        self.persona.set_template(env);
        self.folder = cwd;
        if argv.is_empty() {
            return self.port.send(&Report::Started { pid: None });
        }
        match Workload::start(argv, &self.persona.environment(&Env::new()), &self.folder, self.group.directory()) {
            Ok(workload) => self.workload = Some(workload),
            Err(refused) => self.port.send(&Report::StartFailed { message: refused.message }),
        }
    }

    fn report_start(&mut self) {
        match self.workload.as_mut().map_or(Start::Pending, Workload::learn_start) {
            Start::Pending => (),
            Start::Running(pid) => self.port.send(&Report::Started { pid: Some(pid) }),
            Start::Failed(message) => {
                self.workload = None; // Its process ends by itself and is reaped as a stranger.
                self.port.send(&Report::StartFailed { message });
            }
        }
    }

    fn exec(&mut self, mut request: ExecRequest) {
        request.cwd.get_or_insert_with(|| self.folder.clone());
        let (generation, id) = (request.generation.clone(), request.id.clone());
        let outcome = if generation == self.persona.generation() {
            let env = self.persona.environment(&request.env);
            self.execs.start(request, &env, self.group.directory())
        } else {
            let message = format!("this machine's generation is {}", self.persona.generation());
            Err(Refused::new(Refusal::WrongGeneration, message))
        };
        if let Err(Refused { code, message }) = outcome {
            self.port.send(&Report::ExecFailed { generation, id, code, message });
        }
    }

    /// Collect every process that ended, also the orphans that only PID 1 can collect.
    fn reap(&mut self) {
        // One read takes all: signals of one kind do not queue up.
        let _ = sys::read_available(&self.signals, &mut [0; 1024]);
        while let Some((pid, status)) = sys::reap() {
            if !self.execs.reaped(pid, status, &mut self.port) && self.workload.as_ref().map(Workload::pid) == Some(pid)
            {
                self.report_start(); // If it ended at once, the start's outcome has not been told yet.
                self.end_workload(status);
            }
        }
    }

    fn end_workload(&mut self, status: libc::c_int) {
        if self.workload.take().is_some() {
            let (code, signal) = ending(status);
            let generation = self.persona.generation().to_owned();
            self.port.send(&Report::WorkloadExit { generation, code, signal });
        }
    }
}
