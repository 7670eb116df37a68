//! Becoming another machine than the one this was forked from, while no other process runs.

use crate::connections::Connections;
use crate::frames::{Env, Identity, NIL_GENERATION};
use crate::sys;
use crate::workload_group::WorkloadGroup;
use std::fs;
use std::io;
use std::path::Path;

/// What every command finds in its environment unless somebody says otherwise.
const BASE: [(&str, &str); 3] =
    [("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"), ("HOME", "/root"), ("LANG", "C.UTF-8")];

/// The variable that holds the generation.
const GENERATION: &str = "FORKTREE_GENERATION";

/// Who this machine is, as its commands see it.
pub struct Persona {
    generation: String,
    template: Env,
    branch: Env,
}

impl Persona {
    /// A machine that has just booted.
    pub fn new() -> Self {
        Self { generation: NIL_GENERATION.to_owned(), template: Env::new(), branch: Env::new() }
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
    pub fn assume(
        &mut self,
        identity: Identity,
        group: &mut WorkloadGroup,
        connections: &Connections,
    ) -> Result<(), String> {
        let branch = self.branch_with(&identity.env);
        let failed = |step: &'static str| move |error: io::Error| format!("{step}: {error}");
        let seed = <[u8; 32]>::try_from(identity.entropy.0.as_slice()).map_err(|_| "entropy is not 32 bytes")?;
        let frozen = group.freeze().map_err(failed("freeze the workload"))?;
        sys::set_wall_clock(identity.unix_ns).map_err(failed("set the clock"))?;
        sys::set_hostname(&identity.hostname).map_err(failed("set the host name"))?;
        sys::reseed(&seed).map_err(failed("reseed the random generator"))?;
        connections.end_outside().map_err(failed("end connections to the outside"))?;
        write_file(&identity_file(&identity, &branch)).map_err(failed("write the identity file"))?;
        self.generation = identity.generation;
        self.branch = branch;
        frozen.thaw().map_err(failed("thaw the workload"))
    }

    /// What the machine this was forked from had been told holds here too, unless `own` says otherwise.
    fn branch_with(&self, own: &Env) -> Env {
        let mut branch = self.branch.clone();
        branch.extend(own.iter().map(|(name, value)| (name.clone(), value.clone())));
        branch
    }
}

/// `/run/forktree/identity`, for processes that were running: a shell can read it, and so can anything that splits
/// at newlines and unquotes. Names that a shell cannot hold are left out.
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

/// By rename, so that a reader finds the old identity or the new one, never half of one.
fn write_file(text: &str) -> io::Result<()> {
    let folder = Path::new(crate::RUN_FOLDER);
    fs::create_dir_all(folder)?;
    fs::write(folder.join(".identity"), text)?;
    fs::rename(folder.join(".identity"), folder.join("identity"))
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
        let mut persona = Persona::new();
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
        let mut persona = Persona::new();
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
