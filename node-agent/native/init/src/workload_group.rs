//! The control group of everything that is not ours: it leaves us room.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::io::{AsFd, BorrowedFd};
use std::path::Path;

const ROOT: &str = "/sys/fs/cgroup";

/// The `workload` group. Commands are born in it.
pub struct WorkloadGroup(File);

impl WorkloadGroup {
    pub fn create() -> io::Result<Self> {
        let folder = Path::new(ROOT).join("workload");
        fs::create_dir(&folder)?;
        fs::write(Path::new(ROOT).join("cgroup.subtree_control"), "+pids")?;
        // Leaves room for one more process, ours: a workload that forks without end can still be looked into.
        let threads: u64 = fs::read_to_string("/proc/sys/kernel/threads-max")?.trim().parse().unwrap_or(1024);
        fs::write(folder.join("pids.max"), (threads / 4 * 3).to_string())?;
        let directory = fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY).open(&folder)?;
        Ok(Self(directory))
    }

    /// The folder, for making a process inside the group.
    pub fn directory(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
