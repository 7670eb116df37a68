//! Starting a program in the workload's group, and telling how that went without ever waiting for it.

use crate::frames::{Env, Refusal};
use crate::newborn::{Newborn, Step, Strings, TOLD_BYTES};
use crate::sys;
use std::ffi::CString;
use std::io;
use std::os::unix::io::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

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

/// A checked command.
#[derive(Debug)]
pub struct Program {
    name: String,
    folder: String,
    /// In the form that execve takes. None once it was started.
    strings: Option<Strings>,
}

/// What a program reads and writes.
pub struct Streams<'a> {
    pub stdin: BorrowedFd<'a>,
    pub stdout: BorrowedFd<'a>,
    pub stderr: BorrowedFd<'a>,
    /// All three are one terminal, which becomes the program's own.
    pub is_terminal: bool,
}

/// How a start goes, learnt from a pipe that closes on exec.
pub struct Launch {
    pipe: OwnedFd,
    told: Option<[u8; TOLD_BYTES]>,
    /// Until the pipe is closed: by then the process is off our memory, its program's or ended.
    _newborn: Box<Newborn>,
}

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
            strings: Some(Strings {
                files: Self::candidates(name, env)?,
                arguments: argv.iter().map(|argument| c_string(argument)).collect::<Result<_, _>>()?,
                environment: env
                    .iter()
                    .map(|(key, value)| c_string(&format!("{key}={value}")))
                    .collect::<Result<_, _>>()?,
                working_folder: c_string(folder)?,
            }),
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

    /// Start it, once, in a session and process group of its own. Returns at once: `Launch` tells whether it runs.
    pub fn launch(&mut self, streams: &Streams<'_>, group: BorrowedFd<'_>) -> Result<(libc::pid_t, Launch), Refused> {
        let failed = |error: io::Error| match error.raw_os_error() {
            Some(libc::EAGAIN | libc::ENOMEM | libc::EMFILE) => {
                Refused::new(Refusal::TooMany, format!("no process can be made: {error}"))
            }
            _ => Refused::new(Refusal::Internal, format!("no process can be made: {error}")),
        };
        let strings = self.strings.take().ok_or_else(|| Refused::new(Refusal::Internal, "it was started before"))?;
        let (pipe, writer) = sys::pipe().map_err(failed)?;
        let descriptors = [&streams.stdin, &streams.stdout, &streams.stderr].map(AsRawFd::as_raw_fd);
        let mut newborn = Newborn::new(strings, descriptors, streams.is_terminal, writer.as_raw_fd());
        let pid = newborn.start(group).map_err(failed)?;
        Ok((pid, Launch { pipe, told: None, _newborn: newborn }))
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
    pub fn verdict(&mut self, program: &Program) -> Verdict {
        let mut told = [0; TOLD_BYTES];
        loop {
            match sys::read_available(&self.pipe, &mut told) {
                Ok(Some(0)) => return self.ended(program),
                // Written in one piece, so it is read in one piece. What else is in there nobody of ours wrote.
                Ok(Some(TOLD_BYTES)) => self.told = Some(told),
                Ok(Some(_)) => (),
                Ok(None) | Err(_) => return Verdict::Pending,
            }
        }
    }

    /// How it went, of a process that has ended or is off our memory.
    pub fn ended(&self, program: &Program) -> Verdict {
        match self.told {
            None => Verdict::Running,
            Some([step, errno @ ..]) => Verdict::Refused(program.refused(step, i32::from_ne_bytes(errno))),
        }
    }
}

impl AsRawFd for Launch {
    fn as_raw_fd(&self) -> RawFd {
        self.pipe.as_raw_fd()
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
        let strings = program.strings.expect("not started");
        strings.files.iter().map(|file| file.to_str().expect("UTF-8").to_owned()).collect()
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
