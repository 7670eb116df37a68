//! The fork shim: preloaded into QEMU, it maps guest RAM onto layers and copies it into new ones.
//!
//! Only a thread inside the process can do this: nobody else may change QEMU's mappings, and a copy from outside
//! costs several times as much. It runs beside QEMU's own threads and touches nothing of QEMU but guest RAM.
//!
//! `FORKTREE_SHIM_FD` names an inherited SEQPACKET socket. Without it the library does nothing. `serve` answers
//! requests, `protocol` is their form, `scan` and `track` find the dirty pages, `layer` keeps them, `map` brings them
//! back.

mod layer;
mod map;
mod protocol;
mod scan;
mod serve;
mod syscall;
mod track;

use std::io;
use std::mem::MaybeUninit;
use std::os::unix::io::{FromRawFd, OwnedFd, RawFd};

const SOCKET_VARIABLE: &str = "FORKTREE_SHIM_FD";
/// Of a QEMU that cannot be forked, which is of no use: better none, with a line in its log.
const EXIT_NO_SHIM: i32 = 97;

/// Run by the dynamic linker before QEMU's `main`.
#[used]
#[link_section = ".init_array"]
static START: extern "C" fn() = start;

extern "C" fn start() {
    let value = match std::env::var(SOCKET_VARIABLE) {
        Ok(value) => value,
        Err(_) => return,
    };
    // Nothing that QEMU might start is to inherit either.
    std::env::remove_var(SOCKET_VARIABLE);
    std::env::remove_var("LD_PRELOAD");
    if let Err(error) = begin(&value) {
        complain(&format!("forktree-shim: {SOCKET_VARIABLE}={value}: {error}\n"));
        // SAFETY: Ends the process; `main` has not begun, so nothing needs to be put in order.
        unsafe { libc::_exit(EXIT_NO_SHIM) };
    }
}

/// To standard error, which may be closed: `eprintln` would panic then.
fn complain(line: &str) {
    // SAFETY: The kernel reads `line.len()` bytes of a string that lives.
    unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
}

fn begin(value: &str) -> io::Result<()> {
    let fd = value.parse().map_err(|_| io::ErrorKind::InvalidInput)?;
    let socket = claim(fd)?;
    let mask = block_signals()?;
    let thread = std::thread::Builder::new()
        .name("forktree-shim".into())
        .stack_size(256 << 10)
        .spawn(move || serve::serve(&socket));
    restore_signals(&mask)?;
    thread.map(drop)
}

/// Take `fd` for our own if it is a SEQPACKET socket, and keep it from being inherited.
fn claim(fd: RawFd) -> io::Result<OwnedFd> {
    let mut kind: i32 = 0;
    let mut len: u32 = 4;
    let out = std::ptr::addr_of_mut!(kind).cast();
    // SAFETY: `out` is `len` = 4 writable bytes, the size of `kind`. A descriptor that is not there is EBADF.
    let failed = unsafe {
        libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_TYPE, out, &mut len) != 0
            || libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) != 0
    };
    if failed {
        return Err(io::Error::last_os_error());
    }
    if kind != libc::SOCK_SEQPACKET {
        return Err(io::Error::from_raw_os_error(libc::EPROTOTYPE));
    }
    // SAFETY: The descriptor is open (getsockopt succeeded) and ours: whoever started this process passed it for the
    // shim alone, and QEMU is never told its number.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Block every signal in this thread, and so in those that it starts: QEMU's signals belong to QEMU's threads.
fn block_signals() -> io::Result<libc::sigset_t> {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: Both pointers are to writable sets; sigfillset fills the first and pthread_sigmask, if it succeeds, the
    // second, which is read only then.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        match libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) {
            0 => Ok(before.assume_init()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

fn restore_signals(mask: &libc::sigset_t) -> io::Result<()> {
    // SAFETY: `mask` is a set that the kernel gave us; the old one is not asked for.
    match unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, mask, std::ptr::null_mut()) } {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}
