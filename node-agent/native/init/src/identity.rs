//! Becoming another machine than the one this was forked from, before any program runs on.
//!
//! On the only CPU of a machine we come before all others, and what is done here waits for nothing: so nobody has to be
//! stopped, which would take as long as all the rest. Only where we had to wait after all, for a socket that a program
//! holds in the midst of a call for example, are the programs stopped and is everything done once more.
//!
//! With several CPUs the programs were stopped before the machine was, and go on when all is done.

use crate::connections::Connections;
use crate::frames::{Env, Identity, NIL_GENERATION};
use crate::sys;
use crate::workload_group::WorkloadGroup;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// What every command finds in its environment unless somebody says otherwise.
const BASE: [(&str, &str); 3] =
    [("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"), ("HOME", "/root"), ("LANG", "C.UTF-8")];

/// The variable that holds the generation.
const GENERATION: &str = "FORKTREE_GENERATION";

const SHOWN: &str = "/run/forktree/identity";
const SPARE: &str = "/run/forktree/.identity";

/// What a new identity is put into. All of it is opened once: emulated, the first use of each system call costs
/// milliseconds after every fork, opening files most of all.
pub struct Marks {
    connections: Connections,
    random: File,
    file: IdentityFile,
}

impl Marks {
    /// Fails where the kernel cannot do what every fork has to: such a machine must not be forked.
    pub fn open() -> Result<Self, String> {
        let failed = |step: &'static str| move |error: io::Error| format!("{step}: {error}");
        let connections = Connections::open().map_err(failed(
            "end connections to the outside, as every fork has to (inet_diag, tcp_diag, udp_diag, INET_DIAG_DESTROY)",
        ))?;
        let random = sys::random_generator().map_err(failed("open the random generator"))?;
        let file = IdentityFile::create().map_err(failed("make the identity file"))?;
        Ok(Self { connections, random, file })
    }

    /// Connections first: they are what may have to be waited for.
    fn put(&mut self, identity: &Identity, seed: &[u8; 32], text: &str) -> Result<(), String> {
        let failed = |step: &'static str| move |error: io::Error| format!("{step}: {error}");
        self.connections.end_outside().map_err(failed("end connections to the outside"))?;
        sys::set_wall_clock(identity.unix_ns).map_err(failed("set the clock"))?;
        sys::set_hostname(&identity.hostname).map_err(failed("set the host name"))?;
        sys::reseed(&self.random, seed).map_err(failed("reseed the random generator"))?;
        self.file.write(text).map_err(failed("write the identity file"))
    }
}

/// Who this machine is, as its commands see it.
pub struct Persona {
    /// Nobody runs while we do.
    one_cpu: bool,
    generation: String,
    template: Env,
    branch: Env,
}

impl Persona {
    /// A machine that has just booted.
    pub fn new(one_cpu: bool) -> Self {
        Self { one_cpu, generation: NIL_GENERATION.to_owned(), template: Env::new(), branch: Env::new() }
    }

    pub fn generation(&self) -> &str {
        &self.generation
    }

    /// The template's environment: what all machines that come from this one have in common.
    pub fn set_template(&mut self, env: Env) {
        self.template = env;
    }

    /// The environment of a command. The more particular wins: `extra`, branch, template.
    pub fn environment(&self, extra: &Env) -> Env {
        let mut env: Env = BASE.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        for part in [&self.template, &self.branch, extra] {
            env.extend(part.iter().map(|(name, value)| (name.clone(), value.clone())));
        }
        env.insert(GENERATION.to_owned(), self.generation.clone());
        env
    }

    /// Take on `identity`. After an error the workload runs on and this machine is still who it was, but its clock,
    /// host name or random generator may be the new one's already, and connections to the outside may have ended.
    pub fn assume(&mut self, identity: Identity, group: &mut WorkloadGroup, marks: &mut Marks) -> Result<(), String> {
        let branch = self.branch_with(&identity.env);
        let text = identity_file(&identity, &branch);
        let seed = <[u8; 32]>::try_from(identity.entropy.0.as_slice()).map_err(|_| "entropy is not 32 bytes")?;
        let failed = |step: &'static str| move |error: io::Error| format!("{step}: {error}");
        if !self.one_cpu || !Self::put_alone(&identity, &seed, &text, marks)? {
            let frozen = group.frozen().map_err(failed("freeze the workload"))?;
            marks.put(&identity, &seed, &text)?;
            frozen.thaw().map_err(failed("thaw the workload"))?;
        }
        self.generation = identity.generation;
        self.branch = branch;
        Ok(())
    }

    /// Put it while others may run. Returns whether nobody did.
    fn put_alone(identity: &Identity, seed: &[u8; 32], text: &str, marks: &mut Marks) -> Result<bool, String> {
        let failed = |error: io::Error| format!("see who ran: {error}");
        let before = sys::switches().map_err(failed)?;
        marks.put(identity, seed, text)?;
        Ok(sys::switches().map_err(failed)? == before)
    }

    /// What the machine this was forked from had been told holds here too, unless `own` says otherwise.
    fn branch_with(&self, own: &Env) -> Env {
        let mut branch = self.branch.clone();
        branch.extend(own.iter().map(|(name, value)| (name.clone(), value.clone())));
        branch
    }
}

/// `/run/forktree/identity`, for processes that were running when the machine became another one.
///
/// Of two files that are held open one is written while nobody sees it, and then they change places: who reads the
/// other reads on in that. Neither is ever empty, so that each has its memory also where nothing else has room.
struct IdentityFile {
    shown: Held,
    spare: Held,
}

struct Held {
    file: File,
    length: u64,
}

impl IdentityFile {
    /// New files, whatever was there.
    fn create() -> io::Result<Self> {
        fs::create_dir_all(crate::RUN_FOLDER)?;
        Ok(Self { shown: Held::create(SHOWN)?, spare: Held::create(SPARE)? })
    }

    fn write(&mut self, text: &str) -> io::Result<()> {
        self.spare.write(text)?;
        match sys::exchange(Path::new(SHOWN), Path::new(SPARE)) {
            Ok(()) => {
                std::mem::swap(&mut self.shown, &mut self.spare);
                Ok(())
            }
            // A program took one away, or put another file system in front of both.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                *self = Self::create()?;
                self.shown.write(text)
            }
            Err(error) => Err(error),
        }
    }
}

impl Held {
    fn create(path: &str) -> io::Result<Self> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => (),
        }
        let file = fs::OpenOptions::new().write(true).create_new(true).open(path)?;
        let mut held = Self { file, length: 0 };
        held.write("\n")?;
        Ok(held)
    }

    fn write(&mut self, text: &str) -> io::Result<()> {
        let length = u64::try_from(text.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        self.file.write_all_at(text.as_bytes(), 0)?;
        if length < self.length {
            self.file.set_len(length)?;
        }
        self.length = length;
        Ok(())
    }
}

/// What it says: a shell can read it, and so can anything that splits at newlines and unquotes. Names that a shell
/// cannot hold are left out.
fn identity_file(identity: &Identity, branch: &Env) -> String {
    let own = [(GENERATION, &identity.generation), ("FORKTREE_HOSTNAME", &identity.hostname)];
    let branch = branch.iter().map(|(name, value)| (name.as_str(), value));
    let mut text = String::new();
    for (name, value) in branch.filter(|(name, _)| is_shell_name(name)).chain(own) {
        text.extend([name, "='", &value.replace('\'', "'\\''"), "'\n"]);
    }
    text
}

fn is_shell_name(name: &str) -> bool {
    let mut characters = name.chars();
    characters.next().map_or(false, |first| first.is_ascii_alphabetic() || first == '_')
        && characters.all(|other| other.is_ascii_alphanumeric() || other == '_')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::Blob;

    fn env(pairs: &[(&str, &str)]) -> Env {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn the_more_particular_environment_wins() {
        let mut persona = Persona::new(true);
        persona.set_template(env(&[("A", "template"), ("B", "template"), ("PATH", "/only")]));
        persona.branch = env(&[("B", "branch"), ("C", "branch")]);
        let seen = persona.environment(&env(&[("C", "extra"), (GENERATION, "a lie")]));
        let expected = [("A", "template"), ("B", "branch"), ("C", "extra"), ("PATH", "/only"), ("HOME", "/root")];
        for (name, value) in expected {
            assert_eq!(seen[name], value);
        }
        assert_eq!(seen[GENERATION], NIL_GENERATION);
    }

    #[test]
    fn a_branch_keeps_what_its_parent_was_told_unless_it_is_told_otherwise() {
        let mut persona = Persona::new(true);
        persona.branch = env(&[("A", "parent"), ("B", "parent")]);
        assert_eq!(
            persona.branch_with(&env(&[("B", "own"), ("C", "own")])),
            env(&[("A", "parent"), ("B", "own"), ("C", "own")])
        );
    }

    #[test]
    fn the_identity_file_can_be_read_by_a_shell() {
        let identity = Identity {
            generation: "g".to_owned(),
            hostname: "h".to_owned(),
            unix_ns: 0,
            entropy: Blob(vec![]),
            env: Env::new(),
        };
        let branch = env(&[("A", "it's $HOME\nhere"), ("not a name", "x"), ("9", "x"), ("", "x"), ("_b1", "")]);
        let expected = "A='it'\\''s $HOME\nhere'\n_b1=''\nFORKTREE_GENERATION='g'\nFORKTREE_HOSTNAME='h'\n";
        assert_eq!(identity_file(&identity, &branch), expected);
    }
}
