//! The environment's own long-lived command, and its log.

use crate::frames::Env;
use crate::process::{Launch, Program, Refused, Streams, Verdict};
use crate::sys;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::io::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::PathBuf;

/// A full log becomes `workload.log.1` in place of the one before, so two of these bound what it takes of the guest's
/// memory.
const LOG_BYTES: usize = 1 << 20;

/// The command, from its start on.
pub struct Workload {
    pid: libc::pid_t,
    program: Program,
    launch: Option<Launch>,
    output: Option<OwnedFd>,
    log: Log,
}

/// How the start went.
pub enum Start {
    Pending,
    Running(libc::pid_t),
    Failed(String),
}

impl Workload {
    pub fn start(argv: &[String], env: &Env, folder: &str, group: BorrowedFd<'_>) -> Result<Self, Refused> {
        let failed = |error: io::Error| {
            Refused::new(crate::frames::Refusal::Internal, format!("no streams can be made: {error}"))
        };
        let mut program = Program::new(argv, env, Some(folder))?;
        let stdin = File::open("/dev/null").map_err(failed)?;
        let (output, writer) = sys::pipe().map_err(failed)?;
        let (stdin, output_end) = (stdin.as_fd(), writer.as_fd());
        let streams = Streams { stdin, stdout: output_end, stderr: output_end, is_terminal: false };
        let (pid, launch) = program.launch(&streams, group)?;
        Ok(Self { pid, program, launch: Some(launch), output: Some(output), log: Log::default() })
    }

    pub fn pid(&self) -> libc::pid_t {
        self.pid
    }

    /// What to poll for reading: the start's outcome until it is known, and the output.
    pub fn launch_fd(&self) -> Option<RawFd> {
        self.launch.as_ref().map(AsRawFd::as_raw_fd)
    }

    pub fn output_fd(&self) -> Option<RawFd> {
        self.output.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// How the start went. `Pending` also once it has been told.
    pub fn learn_start(&mut self) -> Start {
        match self.launch.as_mut().map(|launch| launch.verdict(&self.program)) {
            None | Some(Verdict::Pending) => Start::Pending,
            Some(Verdict::Running) => {
                self.launch = None;
                Start::Running(self.pid)
            }
            Some(Verdict::Refused(refused)) => {
                self.launch = None;
                Start::Failed(refused.message)
            }
        }
    }

    /// Move what it wrote into the log.
    pub fn log_output(&mut self) {
        let mut buffer = [0; 16 << 10];
        match self.output.as_ref().map(|output| sys::read_available(output, &mut buffer)) {
            Some(Ok(Some(0)) | Err(_)) => self.output = None,
            // A log that cannot be written, because the workload took its folder away, must not stop the workload.
            Some(Ok(Some(count))) => drop(self.log.append(&buffer[..count])),
            _ => (),
        }
    }
}

/// `/run/forktree/workload.log`.
#[derive(Default)]
struct Log {
    file: Option<File>,
    written: usize,
}

impl Log {
    fn append(&mut self, output: &[u8]) -> io::Result<()> {
        let path = PathBuf::from(crate::RUN_FOLDER).join("workload.log");
        if self.written + output.len() > LOG_BYTES {
            fs::rename(&path, path.with_extension("log.1"))?;
            self.file = None;
        }
        if self.file.is_none() {
            fs::create_dir_all(crate::RUN_FOLDER)?;
            self.file = Some(File::create(&path)?);
            self.written = 0;
        }
        self.written += output.len();
        self.file.as_mut().map_or(Ok(()), |file| file.write_all(output))
    }
}
