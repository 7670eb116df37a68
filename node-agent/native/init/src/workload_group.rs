//! The control group of everything that is not ours: it leaves us room, and can be stopped as a whole.
//!
//! A machine with one CPU is forked with its workload running: we come first on that CPU. With more of them a program
//! would run beside us before we have read who we are, so the workload is stopped before the machine is.

use crate::sys;
use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::io::{AsFd, AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A process in an uninterruptible wait holds the freeze up; a disk in memory keeps such waits short.
const FREEZE_WAIT: Duration = Duration::from_secs(5);

const ROOT: &str = "/sys/fs/cgroup";

/// The `workload` group. Commands are born in it.
pub struct WorkloadGroup {
    folder: PathBuf,
    directory: File,
    events: File,
}

/// The workload does not run while this lives.
pub struct Frozen<'a>(&'a WorkloadGroup);

impl WorkloadGroup {
    pub fn create() -> io::Result<Self> {
        let folder = Path::new(ROOT).join("workload");
        fs::create_dir(&folder)?;
        fs::write(Path::new(ROOT).join("cgroup.subtree_control"), "+pids")?;
        // Leaves room for one more process, ours: a workload that forks without end can still be looked into.
        let threads: u64 = fs::read_to_string("/proc/sys/kernel/threads-max")?.trim().parse().unwrap_or(1024);
        fs::write(folder.join("pids.max"), (threads / 4 * 3).to_string())?;
        let directory = fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY).open(&folder)?;
        let events = File::open(folder.join("cgroup.events"))?;
        Ok(Self { folder, directory, events })
    }

    /// The folder, for making a process inside the group.
    pub fn directory(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    /// Stop every process of the group, until `thaw`; returns when they all have stopped. After an error they run on.
    pub fn freeze(&mut self) -> io::Result<()> {
        self.write_freeze("1")?;
        let outcome = self.wait_frozen();
        if outcome.is_err() {
            self.thaw()?;
        }
        outcome
    }

    /// The same for as long as what is returned lives. Whether they had been stopped before does not matter.
    pub fn frozen(&mut self) -> io::Result<Frozen<'_>> {
        self.freeze()?;
        Ok(Frozen(self))
    }

    /// Let the workload go on.
    pub fn thaw(&self) -> io::Result<()> {
        self.write_freeze("0")
    }

    fn wait_frozen(&mut self) -> io::Result<()> {
        let deadline = Instant::now() + FREEZE_WAIT;
        loop {
            if self.is_frozen()? {
                return Ok(());
            }
            if Instant::now() >= deadline {
                let message = format!("some program did not stop within {} s", FREEZE_WAIT.as_secs());
                return Err(io::Error::new(io::ErrorKind::TimedOut, message));
            }
            // The file is reported as changed (POLLPRI) until it is read again.
            let mut polled = [libc::pollfd { fd: self.events.as_raw_fd(), events: libc::POLLPRI, revents: 0 }];
            sys::poll(&mut polled, Some(deadline.saturating_duration_since(Instant::now())))?;
        }
    }

    fn write_freeze(&self, value: &str) -> io::Result<()> {
        fs::write(self.folder.join("cgroup.freeze"), value)
    }

    fn is_frozen(&mut self) -> io::Result<bool> {
        let mut text = String::new();
        self.events.rewind()?;
        self.events.read_to_string(&mut text)?;
        Ok(text.lines().any(|line| line == "frozen 1"))
    }
}

impl Frozen<'_> {
    /// Let the workload go on.
    pub fn thaw(self) -> io::Result<()> {
        self.0.thaw()
    }
}

impl Drop for Frozen<'_> {
    /// For the ways out by an error: whatever failed, the workload must not stay stopped. Thawing twice is harmless.
    fn drop(&mut self) {
        let _ = self.0.thaw();
    }
}
