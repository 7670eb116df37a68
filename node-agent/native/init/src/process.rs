//! Starting a program in the workload's group, and telling how that went without ever waiting for it.

use crate::frames::{Env, Refusal};
use crate::sys;
use std::ffi::CString;
use std::io;
use std::os::unix::io::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

/// Flags of clone3: into a group (libc's constant does not fit its type).
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Where a name without a slash is looked for if the environment has no PATH.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A refused command: a word for programs and a sentence for people.
#[derive(Debug, PartialEq, Eq)]
pub struct Refused {
    pub code: Refusal,
    pub message: String,
}

impl Refused {
    pub fn new(code: Refusal, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

/// A checked command, in the form that execve takes.
#[derive(Debug)]
pub struct Program {
    name: String,
    folder: String,
    files: Vec<CString>,
    arguments: Vec<CString>,
    environment: Vec<CString>,
    working_folder: CString,
}

/// What a program reads and writes.
pub struct Streams<'a> {
    pub stdin: BorrowedFd<'a>,
    pub stdout: BorrowedFd<'a>,
    pub stderr: BorrowedFd<'a>,
}

/// The two steps of a start that are the caller's fault when they fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Step {
    WorkingFolder = 1,
    Execute = 2,
}

/// How a start went, learnt from a pipe that closes on exec.
pub struct Launch(OwnedFd);

/// What is known of a start.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    Pending,
    Running,
    Refused(Refused),
}

fn c_string(text: &str) -> Result<CString, Refused> {
    CString::new(text).map_err(|_| Refused::new(Refusal::Invalid, "a NUL character cannot be passed to a program"))
}

impl Program {
    pub fn new(argv: &[String], env: &Env, working_folder: Option<&str>) -> Result<Self, Refused> {
        let name = match argv.first() {
            Some(name) if !name.is_empty() => name,
            _ => return Err(Refused::new(Refusal::Invalid, "the command is empty")),
        };
        if let Some(bad) = env.keys().find(|key| key.is_empty() || key.contains('=')) {
            return Err(Refused::new(Refusal::Invalid, format!("{bad:?} cannot name an environment variable")));
        }
        let folder = working_folder.unwrap_or("/");
        Ok(Self {
            name: name.clone(),
            folder: folder.to_owned(),
            files: Self::candidates(name, env)?,
            arguments: argv.iter().map(|argument| c_string(argument)).collect::<Result<_, _>>()?,
            environment: env
                .iter()
                .map(|(key, value)| c_string(&format!("{key}={value}")))
                .collect::<Result<_, _>>()?,
            working_folder: c_string(folder)?,
        })
    }

    /// The files to try, in order: a name without a slash is looked for along PATH.
    fn candidates(name: &str, env: &Env) -> Result<Vec<CString>, Refused> {
        if name.contains('/') {
            return Ok(vec![c_string(name)?]);
        }
        let path = env.get("PATH").map_or(DEFAULT_PATH, String::as_str);
        path.split(':')
            .filter(|folder| !folder.is_empty())
            .map(|folder| c_string(&format!("{folder}/{name}")))
            .collect()
    }

    /// Start it in a session and process group of its own. Returns at once: `Launch` tells whether it runs.
    pub fn launch(&self, streams: &Streams<'_>, group: BorrowedFd<'_>) -> Result<(libc::pid_t, Launch), Refused> {
        let failed = |error: io::Error| match error.raw_os_error() {
            Some(libc::EAGAIN | libc::ENOMEM | libc::EMFILE) => {
                Refused::new(Refusal::TooMany, format!("no process can be made: {error}"))
            }
            _ => Refused::new(Refusal::Internal, format!("no process can be made: {error}")),
        };
        let (reader, writer) = sys::pipe().map_err(failed)?;
        let argv = null_terminated(&self.arguments);
        let envp = null_terminated(&self.environment);
        match fork_into(group).map_err(failed)? {
            0 => self.become_program(streams, &argv, &envp, writer.as_raw_fd()),
            pid => Ok((pid, Launch(reader))),
        }
    }

    /// The child's side. Only system calls from here on, on what was made ready before the fork.
    fn become_program(
        &self,
        streams: &Streams<'_>,
        argv: &[*const libc::c_char],
        envp: &[*const libc::c_char],
        verdict: RawFd,
    ) -> ! {
        let inputs = [streams.stdin.as_raw_fd(), streams.stdout.as_raw_fd(), streams.stderr.as_raw_fd()];
        // SAFETY: this is the only thread, the descriptors are open and above 2, and every pointer is to a string or
        // to a NULL-terminated array of such that the parent made and that this copy of its memory still holds.
        unsafe {
            libc::setsid();
            libc::umask(0o022);
            for (to, from) in (0..).zip(inputs) {
                libc::dup2(from, to);
            }
            // Rust programs start with SIGPIPE ignored, and that would outlive exec, like a blocked SIGCHLD.
            libc::signal(libc::SIGPIPE, libc::SIG_DFL);
            let mut none: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut none);
            libc::sigprocmask(libc::SIG_SETMASK, &none, std::ptr::null_mut());
            if libc::chdir(self.working_folder.as_ptr()) < 0 {
                tell_and_exit(verdict, Step::WorkingFolder, errno());
            }
            let mut reason = libc::ENOENT;
            for file in &self.files {
                libc::execve(file.as_ptr(), argv.as_ptr(), envp.as_ptr());
                match errno() {
                    libc::ENOENT | libc::ENOTDIR => (),
                    libc::EACCES => reason = libc::EACCES, // A later folder may hold one that we may run.
                    other => tell_and_exit(verdict, Step::Execute, other),
                }
            }
            tell_and_exit(verdict, Step::Execute, reason)
        }
    }

    /// Why it does not run, from what the child told.
    fn refused(&self, step: u8, errno: i32) -> Refused {
        let error = io::Error::from_raw_os_error(errno);
        let (name, folder) = (&self.name, &self.folder);
        if step == Step::WorkingFolder as u8 {
            return Refused::new(Refusal::BadCwd, format!("cannot enter {folder:?}: {error}"));
        }
        match errno {
            libc::ENOENT | libc::ENOTDIR => Refused::new(Refusal::NotFound, format!("no program {name:?}: {error}")),
            libc::EACCES | libc::ENOEXEC | libc::EISDIR | libc::E2BIG | libc::ELOOP | libc::ENAMETOOLONG => {
                Refused::new(Refusal::NotExecutable, format!("cannot run {name:?}: {error}"))
            }
            _ => Refused::new(Refusal::Internal, format!("cannot run {name:?}: {error}")),
        }
    }
}

impl Launch {
    /// What is known by now. `program` is the one that was launched.
    pub fn verdict(&self, program: &Program) -> Verdict {
        let mut told = [0; 5];
        match sys::read_available(&self.0, &mut told) {
            Ok(None) => Verdict::Pending,
            // Written in one piece, so it is read in one piece.
            Ok(Some(5)) => {
                let [step, errno @ ..] = told;
                Verdict::Refused(program.refused(step, i32::from_ne_bytes(errno)))
            }
            _ => Verdict::Running,
        }
    }
}

impl AsRawFd for Launch {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

fn null_terminated(strings: &[CString]) -> Vec<*const libc::c_char> {
    strings.iter().map(|string| string.as_ptr()).chain([std::ptr::null()]).collect()
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// Fork a child that is born inside `group`: moving it there afterwards waits for the whole kernel, and a child of a
/// frozen group would stop half-way.
fn fork_into(group: BorrowedFd<'_>) -> io::Result<libc::pid_t> {
    // SAFETY: all zeroes is a valid `clone_args`: everything off.
    let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
    arguments.flags = CLONE_INTO_CGROUP;
    arguments.exit_signal = u64::from(libc::SIGCHLD.unsigned_abs());
    arguments.cgroup = u64::from(group.as_raw_fd().unsigned_abs());
    let size = std::mem::size_of::<libc::clone_args>();
    // SAFETY: without CLONE_VM this is fork: the child runs on a copy of everything. We are single-threaded, so no
    // lock can be left held in that copy.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, std::ptr::addr_of_mut!(arguments), size) };
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    libc::pid_t::try_from(pid).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Ends a forked child without running anything of the parent's.
fn tell_and_exit(verdict: RawFd, step: Step, errno: i32) -> ! {
    let [a, b, c, d] = errno.to_ne_bytes();
    let told = [step as u8, a, b, c, d];
    // SAFETY: pointer and length describe `told`; the descriptor is the open pipe.
    unsafe {
        libc::write(verdict, told.as_ptr().cast(), told.len());
        libc::_exit(127)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(items: &[&str]) -> Vec<String> {
        items.iter().map(|item| (*item).to_owned()).collect()
    }

    fn env(name: &str, value: &str) -> Env {
        Env::from([(name.to_owned(), value.to_owned())])
    }

    fn files(argv0: &str, env: &Env) -> Vec<String> {
        let program = Program::new(&strings(&[argv0]), env, None).expect("a valid command");
        program.files.iter().map(|file| file.to_str().expect("UTF-8").to_owned()).collect()
    }

    #[test]
    fn a_bare_name_is_looked_for_along_the_path_given() {
        assert_eq!(files("ls", &env("PATH", "/a::/b")), ["/a/ls", "/b/ls"]);
        assert_eq!(files("ls", &Env::new()).len(), 6);
        assert_eq!(files("./ls", &env("PATH", "/a")), ["./ls"]);
        assert_eq!(files("/x/ls", &env("PATH", "/a")), ["/x/ls"]);
        assert!(files("ls", &env("PATH", "")).is_empty());
    }

    #[test]
    fn what_execve_cannot_take_is_refused() {
        let table: [(&[&str], Env, Option<&str>); 7] = [
            (&[], Env::new(), None),
            (&[""], Env::new(), None),
            (&["a\0b"], Env::new(), None),
            (&["a", "b\0"], Env::new(), None),
            (&["a"], env("", "x"), None),
            (&["a"], env("A=B", "x"), None),
            (&["a"], env("A", "x\0"), Some("/\0")),
        ];
        for (argv, env, folder) in table {
            let refused = Program::new(&strings(argv), &env, folder).expect_err("refused");
            assert_eq!(refused.code, Refusal::Invalid, "{argv:?}");
        }
    }

    #[test]
    fn each_failure_has_its_code() {
        let program = Program::new(&strings(&["x"]), &Env::new(), Some("/nowhere")).expect("a valid command");
        let table = [
            (Step::WorkingFolder, libc::ENOENT, Refusal::BadCwd),
            (Step::WorkingFolder, libc::EACCES, Refusal::BadCwd),
            (Step::Execute, libc::ENOENT, Refusal::NotFound),
            (Step::Execute, libc::ENOTDIR, Refusal::NotFound),
            (Step::Execute, libc::EACCES, Refusal::NotExecutable),
            (Step::Execute, libc::ENOEXEC, Refusal::NotExecutable),
            (Step::Execute, libc::E2BIG, Refusal::NotExecutable),
            (Step::Execute, libc::EIO, Refusal::Internal),
        ];
        for (step, errno, code) in table {
            assert_eq!(program.refused(step as u8, errno).code, code, "{step:?} {errno}");
        }
    }
}
