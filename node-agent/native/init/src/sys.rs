//! The system calls this program needs, one leaf function each. All `unsafe` of the program is here and in `newborn`.

use crate::frames::TerminalSize;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::io::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::time::Duration;

/// `RNDADDENTROPY` and `RNDRESEEDCRNG` of linux/random.h.
const RND_ADD_ENTROPY: libc::c_ulong = 0x4008_5203;
const RND_RESEED_CRNG: libc::c_ulong = 0x5207;

/// `TIOCGPTPEER` of asm-generic/ioctls.h: opens the other end of a terminal, wherever its file system is mounted.
const TIOCGPTPEER: libc::c_ulong = 0x5441;

/// `NETLINK_KOBJECT_UEVENT`'s group of events that come from the kernel itself.
const KERNEL_UEVENTS: u32 = 1;

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

fn c_path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

fn owned(result: libc::c_int) -> io::Result<OwnedFd> {
    let fd = check(result)?;
    // SAFETY: callers pass the result of a system call that made this descriptor for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Mount `source` at `target`. `options` is the file system's own option string.
pub fn mount(source: &str, target: &Path, kind: &str, flags: libc::c_ulong, options: &str) -> io::Result<()> {
    let (source, target) = (CString::new(source)?, c_path(target)?);
    let (kind, options) = (CString::new(kind)?, CString::new(options)?);
    // SAFETY: all five are valid NUL-terminated strings or plain numbers for the time of the call.
    check(unsafe {
        libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, options.as_ptr().cast::<libc::c_void>())
    })
    .map(drop)
}

/// Make `path` the root folder of this process.
pub fn change_root(path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    // SAFETY: a valid NUL-terminated string.
    check(unsafe { libc::chroot(path.as_ptr()) }).map(drop)
}

/// Load a kernel module from an open file.
pub fn load_module(file: BorrowedFd<'_>) -> io::Result<()> {
    let no_parameters = CString::default();
    // SAFETY: the descriptor is open and the parameter string is valid; the kernel copies both.
    let result = unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), no_parameters.as_ptr(), 0) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

pub fn set_hostname(name: &str) -> io::Result<()> {
    // SAFETY: pointer and length describe one live string.
    check(unsafe { libc::sethostname(name.as_ptr().cast(), name.len()) }).map(drop)
}

/// Set the wall clock, nanoseconds since 1970.
pub fn set_wall_clock(unix_ns: i64) -> io::Result<()> {
    let time = libc::timespec { tv_sec: unix_ns.div_euclid(1_000_000_000), tv_nsec: unix_ns.rem_euclid(1_000_000_000) };
    // SAFETY: a valid timespec.
    check(unsafe { libc::clock_settime(libc::CLOCK_REALTIME, &time) }).map(drop)
}

/// The kernel's random generator, to be given to `reseed`.
pub fn random_generator() -> io::Result<File> {
    std::fs::OpenOptions::new().write(true).open("/dev/urandom")
}

/// Credit `seed` to the kernel's random generator and make every CPU use it from its next read on.
pub fn reseed(generator: &File, seed: &[u8; 32]) -> io::Result<()> {
    #[repr(C)]
    struct PoolInfo {
        entropy_bits: libc::c_int,
        size_bytes: libc::c_int,
        data: [u8; 32],
    }
    let info = PoolInfo { entropy_bits: 256, size_bytes: 32, data: *seed };
    // SAFETY: `PoolInfo` is `struct rand_pool_info` with as many bytes as `size_bytes` says.
    check(unsafe { libc::ioctl(generator.as_raw_fd(), RND_ADD_ENTROPY, std::ptr::addr_of!(info)) })?;
    // SAFETY: takes no argument.
    check(unsafe { libc::ioctl(generator.as_raw_fd(), RND_RESEED_CRNG) }).map(drop)
}

/// Bring a network interface up, with an address and its netmask where it has none of its own.
pub fn interface_up(name: &str, address: Option<(Ipv4Addr, Ipv4Addr)>) -> io::Result<()> {
    let socket = datagram_socket()?;
    // SAFETY: all zeroes is a valid `ifreq`: integers and byte arrays only.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    if let Some((address, netmask)) = address {
        for (control, value) in [(libc::SIOCSIFADDR, address), (libc::SIOCSIFNETMASK, netmask)] {
            request.ifr_ifru.ifru_addr = socket_address(value);
            // SAFETY: a valid `ifreq` that outlives the call.
            check(unsafe { libc::ioctl(socket.as_raw_fd(), control, std::ptr::addr_of!(request)) })?;
        }
    }
    // Up (1) and running (64) fit in the field's 16 bits.
    request.ifr_ifru.ifru_flags = 1 | 64;
    // SAFETY: a valid `ifreq` that outlives the call.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, std::ptr::addr_of!(request)) }).map(drop)
}

/// Send what is for no network of ours to `gateway`.
pub fn default_route(gateway: Ipv4Addr) -> io::Result<()> {
    let socket = datagram_socket()?;
    // SAFETY: all zeroes is a valid `rtentry`: integers, addresses and a null pointer for "any device".
    let mut route: libc::rtentry = unsafe { std::mem::zeroed() };
    route.rt_dst = socket_address(Ipv4Addr::UNSPECIFIED);
    route.rt_genmask = socket_address(Ipv4Addr::UNSPECIFIED);
    route.rt_gateway = socket_address(gateway);
    // Up (1) and by a gateway (2).
    route.rt_flags = 1 | 2;
    // SAFETY: a valid `rtentry` that outlives the call.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCADDRT, std::ptr::addr_of!(route)) }).map(drop)
}

fn datagram_socket() -> io::Result<OwnedFd> {
    // SAFETY: plain numbers.
    owned(unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) })
}

/// `address` as `struct sockaddr` has it: a port of no bytes set, and four of the address.
fn socket_address(address: Ipv4Addr) -> libc::sockaddr {
    let mut data = [0; 14];
    for (to, from) in data[2..].iter_mut().zip(address.octets()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    libc::sockaddr { sa_family: 2, sa_data: data } // AF_INET
}

/// Run before every other process of the guest, and let no child inherit that.
pub fn become_realtime() -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: 99 };
    let policy = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;
    // SAFETY: a valid `sched_param`; 0 is the calling process.
    check(unsafe { libc::sched_setscheduler(0, policy, &parameters) })?;
    // Otherwise a second of work lets others run in the midst of it.
    std::fs::write("/proc/sys/kernel/sched_rt_runtime_us", "-1")
}

/// How often another process has had our CPU.
pub fn switches() -> io::Result<libc::c_long> {
    // SAFETY: all zeroes is a valid `rusage`: integers only.
    let mut used: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `used` is valid for the call.
    check(unsafe { libc::getrusage(libc::RUSAGE_THREAD, &mut used) })?;
    Ok(used.ru_nvcsw.wrapping_add(used.ru_nivcsw))
}

/// Have two files change places.
pub fn exchange(one: &Path, other: &Path) -> io::Result<()> {
    let (one, other) = (c_path(one)?, c_path(other)?);
    let here = libc::AT_FDCWD;
    // SAFETY: valid NUL-terminated strings.
    let result = unsafe { libc::renameat2(here, one.as_ptr(), here, other.as_ptr(), libc::RENAME_EXCHANGE) };
    check(result).map(drop)
}

/// Let the workload raise its limit of open files as far as on an ordinary host (the kernel's start value is 4096).
pub fn raise_file_limit() -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: 1024, rlim_max: 1 << 20 };
    // SAFETY: a valid `rlimit`.
    check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }).map(drop)
}

/// Block SIGCHLD and get a descriptor that is readable while one waits.
pub fn child_signals() -> io::Result<OwnedFd> {
    // SAFETY: all zeroes is a valid `sigset_t`, and the calls below write only into it.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is valid and ours; a null old set is allowed.
    unsafe {
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGCHLD);
        check(libc::sigprocmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()))?;
    }
    // SAFETY: `set` is valid; -1 asks for a new descriptor.
    owned(unsafe { libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) })
}

/// Wait until one of `polled` has an event or `timeout` is over; no time-out waits without end.
pub fn poll(polled: &mut [libc::pollfd], timeout: Option<Duration>) -> io::Result<()> {
    let milliseconds = timeout.map_or(-1, |duration| {
        // Rounded up, or the last fraction of a millisecond would be a busy loop.
        libc::c_int::try_from(duration.as_millis() + 1).unwrap_or(libc::c_int::MAX)
    });
    let count = libc::nfds_t::try_from(polled.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: pointer and count describe one live slice.
    match check(unsafe { libc::poll(polled.as_mut_ptr(), count, milliseconds) }) {
        Err(error) if error.kind() != io::ErrorKind::Interrupted => Err(error),
        _ => Ok(()),
    }
}

/// One child that ended and its wait status, if there is any.
pub fn reap() -> Option<(libc::pid_t, libc::c_int)> {
    let mut status = 0;
    // SAFETY: `status` is valid for the call.
    let pid = unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG) };
    (pid > 0).then_some((pid, status))
}

/// A pipe, read end first. The read end does not block; both close on exec.
pub fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut ends: [RawFd; 2] = [-1; 2];
    // SAFETY: room for two descriptors.
    check(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) })?;
    // SAFETY: pipe2 made both for us alone.
    let (reader, writer) = unsafe { (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) };
    set_nonblocking(&reader)?;
    Ok((reader, writer))
}

/// A pipe for a command's input, read end first. The write end does not block; both close on exec.
pub fn input_pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut ends: [RawFd; 2] = [-1; 2];
    // SAFETY: room for two descriptors.
    check(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) })?;
    // SAFETY: pipe2 made both for us alone.
    let (reader, writer) = unsafe { (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) };
    set_nonblocking(&writer)?;
    Ok((reader, writer))
}

/// Have reads and writes of `fd` return rather than wait.
pub fn set_nonblocking(fd: &OwnedFd) -> io::Result<()> {
    // SAFETY: the descriptor is open. It has no other flags that could be set.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) }).map(drop)
}

/// A new terminal: our end, which does not block, and the command's. Both close on exec.
pub fn terminal(size: TerminalSize) -> io::Result<(OwnedFd, OwnedFd)> {
    let path = CString::new("/dev/pts/ptmx")?;
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: a valid NUL-terminated string.
    let ours = owned(unsafe { libc::open(path.as_ptr(), flags) })?;
    let unlocked: libc::c_int = 0;
    // SAFETY: TIOCSPTLCK reads one int.
    check(unsafe { libc::ioctl(ours.as_raw_fd(), libc::TIOCSPTLCK, std::ptr::addr_of!(unlocked)) })?;
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    // SAFETY: TIOCGPTPEER takes flags of open and returns a descriptor made for us alone.
    let theirs = owned(unsafe { libc::ioctl(ours.as_raw_fd(), TIOCGPTPEER, flags) })?;
    set_terminal_size(&ours, size)?;
    Ok((ours, theirs))
}

/// Programs on the terminal are told by a signal.
pub fn set_terminal_size(terminal: &OwnedFd, size: TerminalSize) -> io::Result<()> {
    let size = libc::winsize { ws_row: size.rows, ws_col: size.cols, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: TIOCSWINSZ reads one `winsize`.
    check(unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSWINSZ, std::ptr::addr_of!(size)) }).map(drop)
}

/// Write what can be written. `Ok(None)`: nothing now.
pub fn write_available(fd: &impl AsRawFd, data: &[u8]) -> io::Result<Option<usize>> {
    // SAFETY: pointer and length describe one live slice.
    let count = unsafe { libc::write(fd.as_raw_fd(), data.as_ptr().cast(), data.len()) };
    if let Ok(count) = usize::try_from(count) {
        return Ok(Some(count));
    }
    let error = io::Error::last_os_error();
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
        _ => Err(error),
    }
}

/// How many bytes wait in a pipe.
pub fn waiting_bytes(pipe: &OwnedFd) -> usize {
    let mut count: libc::c_int = 0;
    // SAFETY: FIONREAD writes one int.
    let result = unsafe { libc::ioctl(pipe.as_raw_fd(), libc::FIONREAD, &mut count) };
    if result < 0 {
        return 0;
    }
    usize::try_from(count).unwrap_or(0)
}

/// Read what there is. `Ok(None)`: nothing now; `Ok(Some(0))`: the end.
pub fn read_available(fd: &impl AsRawFd, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    // SAFETY: pointer and length describe one live slice.
    let count = unsafe { libc::read(fd.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len()) };
    if let Ok(count) = usize::try_from(count) {
        return Ok(Some(count));
    }
    let error = io::Error::last_os_error();
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
        _ => Err(error),
    }
}

/// A file in memory that holds `content`, positioned at its start.
pub fn memory_file(content: &[u8]) -> io::Result<OwnedFd> {
    use std::io::{Seek, Write};
    let name = CString::new("stdin")?;
    // SAFETY: a valid NUL-terminated string.
    let fd = owned(unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) })?;
    let mut file = File::from(fd);
    file.write_all(content)?;
    file.rewind()?;
    Ok(file.into())
}

/// SIGKILL to the process group that `leader` leads, and to `leader` in case it has not made the group yet.
pub fn kill_group(leader: libc::pid_t) {
    // SAFETY: plain numbers. The leader is not reaped yet (the caller's duty), so its number is still its own.
    unsafe {
        libc::kill(-leader, libc::SIGKILL);
        libc::kill(leader, libc::SIGKILL);
    }
}

/// A socket on which the kernel tells of new and changed devices.
pub fn device_events() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: plain numbers.
    let socket = owned(unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_KOBJECT_UEVENT) })?;
    // SAFETY: all zeroes is a valid `sockaddr_nl`.
    let mut address: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
    address.nl_family = libc::sa_family_t::try_from(libc::AF_NETLINK).map_err(|_| io::ErrorKind::InvalidInput)?;
    address.nl_groups = KERNEL_UEVENTS;
    let size = libc::socklen_t::try_from(std::mem::size_of_val(&address)).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: pointer and size describe `address`.
    check(unsafe { libc::bind(socket.as_raw_fd(), std::ptr::addr_of!(address).cast(), size) })?;
    Ok(socket)
}

/// A socket on which the kernel lists the machine's sockets and ends those that it is told to.
pub fn socket_diagnosis() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: plain numbers.
    owned(unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_SOCK_DIAG) })
}

/// Send one message to the kernel. It has been dealt with on return.
pub fn send(netlink: &OwnedFd, message: &[u8]) -> io::Result<()> {
    // SAFETY: pointer and length describe one live slice. An unconnected netlink socket sends to the kernel.
    let count = unsafe { libc::send(netlink.as_raw_fd(), message.as_ptr().cast(), message.len(), 0) };
    if count < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Begin to connect to a port of 127.0.0.1, never blocking. Poll for writing tells when that is decided.
pub fn connect_loopback(port: u16) -> io::Result<TcpStream> {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: plain numbers.
    let socket = owned(unsafe { libc::socket(libc::AF_INET, kind, 0) })?;
    // SAFETY: all zeroes is a valid `sockaddr_in`.
    let mut address: libc::sockaddr_in = unsafe { std::mem::zeroed() };
    address.sin_family = libc::sa_family_t::try_from(libc::AF_INET).map_err(|_| io::ErrorKind::InvalidInput)?;
    address.sin_port = port.to_be();
    address.sin_addr.s_addr = u32::from_ne_bytes([127, 0, 0, 1]);
    let size = libc::socklen_t::try_from(std::mem::size_of_val(&address)).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: pointer and size describe `address`.
    match check(unsafe { libc::connect(socket.as_raw_fd(), std::ptr::addr_of!(address).cast(), size) }) {
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
        _ => Ok(socket.into()),
    }
}

/// Whether the peer is to see a connection reset where it is closed, or its process killed, rather than ended.
pub fn reset_when_closed(stream: &TcpStream, reset: bool) -> io::Result<()> {
    let linger = libc::linger { l_onoff: libc::c_int::from(reset), l_linger: 0 };
    let size = libc::socklen_t::try_from(std::mem::size_of_val(&linger)).map_err(|_| io::ErrorKind::InvalidInput)?;
    let value = std::ptr::addr_of!(linger).cast();
    // SAFETY: pointer and size describe `linger`.
    check(unsafe { libc::setsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, value, size) }).map(drop)
}

/// End the machine. The kernel command line says `reboot=t panic=-1` and QEMU runs with `-no-reboot`.
pub fn end_machine() -> ! {
    // SAFETY: plain numbers.
    unsafe { libc::reboot(libc::RB_AUTOBOOT) };
    // Only without the right to reboot; PID 1's exit is a panic, which ends the machine too.
    std::process::exit(1)
}
