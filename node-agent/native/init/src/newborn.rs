//! A process that has not become its program yet.
//!
//! It runs on our memory, on a stack of its own and beside us: to copy all we have for it, as fork does, takes longer
//! than all the rest of a start, emulated most of all. So it reads only what nobody changes, and makes only system
//! calls, and those without libc: the place where that keeps errors is ours.

use std::arch::asm;
use std::ffi::CString;
use std::io;
use std::os::unix::io::{AsRawFd, BorrowedFd, RawFd};

/// Flags of clone3: into a group (libc's constant does not fit its type), and on the same memory.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
const CLONE_VM: u64 = 0x100;

/// Many times what a few calls of leaf functions take.
const STACK_BYTES: usize = 16 << 10;

const SIGNAL_SET_BYTES: usize = 8;

/// `TIOCSCTTY` of asm-generic/ioctls.h.
const TIOCSCTTY: usize = 0x540E;

/// The two steps of a start that are the caller's fault when they fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Step {
    WorkingFolder = 1,
    Execute = 2,
}

/// What a process is told when it does not become its program: the step and errno.
pub const TOLD_BYTES: usize = 5;

/// All strings that a start needs.
#[derive(Debug)]
pub struct Strings {
    /// The files to try, in order.
    pub files: Vec<CString>,
    pub arguments: Vec<CString>,
    pub environment: Vec<CString>,
    pub working_folder: CString,
}

/// What such a process reads and runs on. It must live until that has become its program or has ended.
pub struct Newborn {
    files: Vec<*const libc::c_char>,
    arguments: Vec<*const libc::c_char>,
    environment: Vec<*const libc::c_char>,
    working_folder: *const libc::c_char,
    /// For its descriptors 0, 1 and 2; all are above these.
    streams: [RawFd; 3],
    /// Its input is a terminal, which becomes its own.
    on_terminal: bool,
    /// Closed by becoming the program.
    verdict: RawFd,
    stack: Vec<u8>,
    /// Behind the pointers.
    _strings: Strings,
}

/// `struct sigaction` as the kernel has it. All zeroes: the default.
#[repr(C)]
struct KernelSigaction {
    handler: usize,
    flags: libc::c_ulong,
    restorer: usize,
    mask: u64,
}

impl Newborn {
    pub fn new(strings: Strings, streams: [RawFd; 3], on_terminal: bool, verdict: RawFd) -> Box<Self> {
        let terminated = |strings: &[CString]| -> Vec<*const libc::c_char> {
            strings.iter().map(|string| string.as_ptr()).chain([std::ptr::null()]).collect()
        };
        Box::new(Self {
            files: strings.files.iter().map(|file| file.as_ptr()).collect(),
            arguments: terminated(&strings.arguments),
            environment: terminated(&strings.environment),
            working_folder: strings.working_folder.as_ptr(),
            streams,
            on_terminal,
            verdict,
            stack: vec![0; STACK_BYTES],
            _strings: strings,
        })
    }

    /// Start it, born inside `group`: moving it there afterwards waits for the whole kernel.
    pub fn start(&mut self, group: BorrowedFd<'_>) -> io::Result<libc::pid_t> {
        // SAFETY: all zeroes is a valid `clone_args`: everything off.
        let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
        arguments.flags = CLONE_INTO_CGROUP | CLONE_VM;
        arguments.exit_signal = u64::from(libc::SIGCHLD.unsigned_abs());
        arguments.cgroup = u64::from(group.as_raw_fd().unsigned_abs());
        arguments.stack = self.stack.as_mut_ptr() as u64;
        let end = (arguments.stack + STACK_BYTES as u64) & !15; // A call needs it aligned.
        arguments.stack_size = end - arguments.stack;
        let entry: extern "C" fn(*const Newborn) -> ! = become_program;
        let result: isize;
        // SAFETY: in us this is one system call with valid arguments. The new process never leaves the block: it calls
        // `become_program` on its own stack.
        unsafe {
            asm!(
                "syscall",
                "test rax, rax",
                "jnz 2f",
                "xor ebp, ebp",
                "mov rdi, r13",
                "call r12",
                "ud2",
                "2:",
                inlateout("rax") libc::SYS_clone3 => result,
                in("rdi") std::ptr::addr_of!(arguments),
                in("rsi") std::mem::size_of::<libc::clone_args>(),
                in("r12") entry,
                in("r13") std::ptr::addr_of!(*self),
                lateout("rcx") _,
                lateout("r11") _,
            );
        }
        match libc::pid_t::try_from(result) {
            Ok(pid) if pid > 0 => Ok(pid),
            _ => Err(io::Error::from_raw_os_error(errno(result))),
        }
    }
}

/// The new process.
extern "C" fn become_program(newborn: *const Newborn) -> ! {
    // SAFETY: `start`'s caller keeps it until we are gone, and nobody changes it.
    let newborn = unsafe { &*newborn };
    let default = KernelSigaction { handler: 0, flags: 0, restorer: 0, mask: 0 };
    let none: u64 = 0;
    // SAFETY: every pointer is to something that lives on our stack or in `newborn`, strings and arrays of such are
    // terminated, and the descriptors are open.
    unsafe {
        call(libc::SYS_setsid, [0; 4]);
        call(libc::SYS_umask, [0o022, 0, 0, 0]);
        let mut to = 0;
        for from in newborn.streams {
            call(libc::SYS_dup2, [from.unsigned_abs() as usize, to, 0, 0]);
            to = to.wrapping_add(1);
        }
        if newborn.on_terminal {
            call(libc::SYS_ioctl, [0, TIOCSCTTY, 0, 0]); // What fails here the program finds out for itself.
        }
        // Rust programs start with SIGPIPE ignored, and that would outlive exec, like a blocked SIGCHLD.
        let (default, none) = (std::ptr::addr_of!(default) as usize, std::ptr::addr_of!(none) as usize);
        call(libc::SYS_rt_sigaction, [libc::SIGPIPE as usize, default, 0, SIGNAL_SET_BYTES]);
        // Handlers of ours would run on what is ours alone.
        call(libc::SYS_rt_sigaction, [libc::SIGSEGV as usize, default, 0, SIGNAL_SET_BYTES]);
        call(libc::SYS_rt_sigaction, [libc::SIGBUS as usize, default, 0, SIGNAL_SET_BYTES]);
        call(libc::SYS_rt_sigprocmask, [libc::SIG_SETMASK as usize, none, 0, SIGNAL_SET_BYTES]);
        let entered = call(libc::SYS_chdir, [newborn.working_folder as usize, 0, 0, 0]);
        if entered < 0 {
            tell_and_exit(newborn.verdict, Step::WorkingFolder, errno(entered));
        }
        let (argv, envp) = (newborn.arguments.as_ptr() as usize, newborn.environment.as_ptr() as usize);
        let mut reason = libc::ENOENT;
        for file in &newborn.files {
            match errno(call(libc::SYS_execve, [*file as usize, argv, envp, 0])) {
                libc::ENOENT | libc::ENOTDIR => (),
                libc::EACCES => reason = libc::EACCES, // A later folder may hold one that we may run.
                other => tell_and_exit(newborn.verdict, Step::Execute, other),
            }
        }
        tell_and_exit(newborn.verdict, Step::Execute, reason)
    }
}

unsafe fn tell_and_exit(verdict: RawFd, step: Step, errno: i32) -> ! {
    let [a, b, c, d] = errno.to_ne_bytes();
    let told: [u8; TOLD_BYTES] = [step as u8, a, b, c, d];
    // SAFETY: pointer and length describe `told`; the descriptor is the open pipe.
    unsafe {
        call(libc::SYS_write, [verdict.unsigned_abs() as usize, std::ptr::addr_of!(told) as usize, TOLD_BYTES, 0]);
    }
    loop {
        // SAFETY: plain numbers. It does not return.
        unsafe { call(libc::SYS_exit_group, [127, 0, 0, 0]) };
    }
}

/// One system call; negative: what went wrong.
///
/// # Safety
/// That of the system call.
unsafe fn call(number: libc::c_long, arguments: [usize; 4]) -> isize {
    let [first, second, third, fourth] = arguments;
    let result: isize;
    // SAFETY: the caller's.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") first,
            in("rsi") second,
            in("rdx") third,
            in("r10") fourth,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result
}

/// Of a system call's result.
fn errno(result: isize) -> i32 {
    i32::try_from(result.wrapping_neg()).unwrap_or(libc::EINVAL)
}
