//! From the initramfs to a root file system that can be written: modules, disk, overlay, the usual mounts.

use crate::network::{self, Network};
use crate::sys;
use std::fs;
use std::io;
use std::os::unix::fs::{symlink, OpenOptionsExt, PermissionsExt};
use std::os::unix::io::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a device may take to show up: a slow emulated machine needs well under a second.
const DEVICE_WAIT: Duration = Duration::from_secs(20);

/// The name that the host gives our port of the virtio console.
const PORT_NAME: &str = "forktree";

/// What failed, for the console: nobody but a reader of the serial log ever sees it.
#[derive(Debug)]
pub struct BootError {
    step: String,
    cause: io::Error,
}

impl std::fmt::Display for BootError {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}: {}", self.step, self.cause)
    }
}

trait Step<T> {
    fn step(self, what: impl Into<String>) -> Result<T, BootError>;
}

impl<T> Step<T> for io::Result<T> {
    fn step(self, what: impl Into<String>) -> Result<T, BootError> {
        self.map_err(|cause| BootError { step: what.into(), cause })
    }
}

/// Bring the machine up to the point where it can serve; returns the open guest channel.
pub fn boot() -> Result<fs::File, BootError> {
    for (target, kind) in [("/dev", "devtmpfs"), ("/proc", "proc"), ("/sys", "sysfs")] {
        mount_new(Path::new(target), kind, 0, "")?;
    }
    let events = sys::device_events().step("listen for devices")?;
    load_modules(Path::new("/modules"))?;
    let line = fs::read_to_string("/proc/cmdline").step("read the kernel command line")?;
    let network = Network::asked_for(&line).step("read forktree.network")?;
    if network.is_some() {
        load_modules(Path::new(network::MODULES))?;
    }
    wait_for(&events, "the root disk", || Path::new("/dev/vda").exists().then_some(()))?;
    enter_root(overlay_bytes(&line)?)?;
    mount_usual()?;
    prefer_killing_to_thrashing();
    sys::interface_up("lo", None).step("bring loopback up")?;
    if let Some(network) = network {
        wait_for(&events, "the network device", || Path::new("/sys/class/net/eth0").exists().then_some(()))?;
        network.set_up().step("set up the network")?;
    }
    without_multipath_tcp()?;
    sys::raise_file_limit().step("raise the limit of open files")?;
    let port = wait_for(&events, "the guest channel", find_port)?;
    let mut options = fs::OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC);
    options.open(&port).step(format!("open {}", port.display()))
}

/// Load every module named in `order`, one a line: each needs only those before it.
fn load_modules(folder: &Path) -> Result<(), BootError> {
    let order = fs::read_to_string(folder.join("order")).step("read the order of modules")?;
    for name in order.lines() {
        let file = fs::File::open(folder.join(name)).step(format!("open module {name}"))?;
        sys::load_module(file.as_fd()).step(format!("load module {name}"))?;
    }
    Ok(())
}

/// Call `look` until it finds something, again after each event of the kernel's.
fn wait_for<T>(events: &OwnedFd, what: &str, mut look: impl FnMut() -> Option<T>) -> Result<T, BootError> {
    let deadline = Instant::now() + DEVICE_WAIT;
    loop {
        if let Some(found) = look() {
            return Ok(found);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::from(io::ErrorKind::TimedOut)).step(format!("wait for {what}"));
        }
        let mut polled = [libc::pollfd { fd: events.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
        sys::poll(&mut polled, Some(left)).step(format!("wait for {what}"))?;
        // What the event says does not matter. An overrun is reported as an error, and is an event as well.
        let _ = sys::read_available(events, &mut [0; 8192]);
    }
}

/// Whether the machine was built with one CPU. What a program turns off and on later does not count.
pub fn has_one_cpu() -> io::Result<bool> {
    Ok(fs::read_to_string("/sys/devices/system/cpu/present")?.trim() == "0")
}

/// `forktree.overlay=BYTES` of the kernel command line.
fn overlay_bytes(line: &str) -> Result<u64, BootError> {
    parse_overlay_bytes(line).ok_or(io::ErrorKind::InvalidInput.into()).step("read forktree.overlay=BYTES")
}

fn parse_overlay_bytes(command_line: &str) -> Option<u64> {
    let mut values = command_line.split_whitespace().filter_map(|word| word.strip_prefix("forktree.overlay="));
    values.next()?.parse().ok().filter(|bytes| *bytes > 0)
}

/// Lay a writable file system over the disk, move into it and forget the initramfs.
fn enter_root(overlay_bytes: u64) -> Result<(), BootError> {
    let (lower, writable, root) = (Path::new("/lower"), Path::new("/writable"), Path::new("/root"));
    for folder in [lower, writable, root] {
        fs::create_dir_all(folder).step(format!("make {}", folder.display()))?;
    }
    sys::mount("/dev/vda", lower, "erofs", libc::MS_RDONLY, "").step("mount the root disk")?;
    sys::mount("tmpfs", writable, "tmpfs", 0, &format!("size={overlay_bytes},mode=755")).step("mount the overlay")?;
    for folder in ["/writable/upper", "/writable/work"] {
        fs::create_dir(folder).step(format!("make {folder}"))?;
        // The upper folder's mode is the root folder's.
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).step(format!("set the mode of {folder}"))?;
    }
    let layers = "lowerdir=/lower,upperdir=/writable/upper,workdir=/writable/work";
    sys::mount("overlay", root, "overlay", 0, layers).step("mount the root file system")?;
    for name in ["dev", "proc", "sys"] {
        let target = root.join(name);
        fs::create_dir_all(&target).step(format!("make /{name}"))?;
        sys::mount(&format!("/{name}"), &target, "", libc::MS_MOVE, "").step(format!("move /{name}"))?;
    }
    // Their memory is the machine's. A running program's file goes when the program does, which is never.
    let _ = fs::remove_dir_all("/modules");
    let _ = fs::remove_file("/init");
    std::env::set_current_dir(root).step("enter the root file system")?;
    sys::mount(".", Path::new("/"), "", libc::MS_MOVE, "").step("move the root file system")?;
    sys::change_root(Path::new(".")).step("change root")?;
    std::env::set_current_dir("/").step("enter the new root")
}

fn mount_new(target: &Path, kind: &str, flags: libc::c_ulong, options: &str) -> Result<(), BootError> {
    fs::create_dir_all(target).step(format!("make {}", target.display()))?;
    sys::mount(kind, target, kind, flags, options).step(format!("mount {}", target.display()))
}

/// What programs expect to find. /tmp stays on the overlay, so that one limit bounds all that is written.
fn mount_usual() -> Result<(), BootError> {
    let quiet = libc::MS_NOSUID | libc::MS_NODEV;
    mount_new(Path::new("/dev/pts"), "devpts", libc::MS_NOSUID | libc::MS_NOEXEC, "mode=620,gid=5,ptmxmode=666")?;
    mount_new(Path::new("/dev/shm"), "tmpfs", quiet, "mode=1777")?;
    mount_new(Path::new("/run"), "tmpfs", quiet, "mode=755,size=16m")?;
    mount_new(Path::new("/sys/fs/cgroup"), "cgroup2", quiet | libc::MS_NOEXEC, "")?;
    fs::create_dir_all("/tmp").step("make /tmp")?;
    fs::set_permissions("/tmp", fs::Permissions::from_mode(0o1777)).step("set the mode of /tmp")?;
    for (link, target) in [
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ] {
        symlink(target, Path::new("/dev").join(link)).step(format!("link /dev/{link}"))?;
    }
    Ok(())
}

/// Let the kernel kill the largest process once what was used in the last second does not fit into memory any more.
/// Otherwise it reads programs' pages from the disk again and again first: an emulated guest of 256 MiB whose one
/// program took all memory did that for 20 to 47 seconds, and for 6 to 12 with this (Linux 6.1).
fn prefer_killing_to_thrashing() {
    let folder = Path::new("/sys/kernel/mm/lru_gen");
    for (file, value) in [("enabled", "y"), ("min_ttl_ms", "1000")] {
        // A kernel without it is slower to act, and no less right.
        let _ = fs::write(folder.join(file), value);
    }
}

/// Ending the parts of such a connection leaves whoever reads from it waiting (Linux 6.1), so none may be made. A
/// program that asks for one is told that there is no such protocol, as by a kernel without it, and takes TCP.
fn without_multipath_tcp() -> Result<(), BootError> {
    match fs::write("/proc/sys/net/mptcp/enabled", "0") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        outcome => outcome.step("turn multipath TCP off"),
    }
}

/// The device file of the port with our name, once the driver has learnt that name from the host.
fn find_port() -> Option<PathBuf> {
    for entry in fs::read_dir("/sys/class/virtio-ports").ok()?.flatten() {
        let device = Path::new("/dev").join(entry.file_name());
        let name = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
        if name.trim_end() == PORT_NAME && device.exists() {
            return Some(device);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::parse_overlay_bytes;

    #[test]
    fn the_overlay_has_the_size_that_the_command_line_says() {
        let table = [
            ("console=ttyS0 forktree.overlay=67108864 quiet", Some(67_108_864)),
            ("forktree.overlay=1\n", Some(1)),
            ("forktree.overlay=0", None),
            ("forktree.overlay=", None),
            ("forktree.overlay=64M", None),
            ("xforktree.overlay=5", None),
            ("", None),
        ];
        for (line, bytes) in table {
            assert_eq!(parse_overlay_bytes(line), bytes, "{line}");
        }
    }
}
