//! PID 1 of a guest: boots the root file system, runs commands for the host, and takes on a new identity after a fork.
//!
//! It runs before every other process of the guest, as one loop that never blocks. What it says goes to the host
//! through a virtio console port; only what ends the machine goes to the console.

mod archive;
mod boot;
mod connections;
mod execs;
mod files;
mod frames;
mod http_get;
mod identity;
mod input;
mod network;
mod newborn;
mod output;
mod port;
mod process;
mod relay;
mod remembered;
#[cfg(test)]
mod scratch;
mod server;
mod socket_diag;
mod sys;
mod transfer;
mod workload;
mod workload_group;

use std::io;

/// Where the workload finds what concerns it.
const RUN_FOLDER: &str = "/run/forktree";

fn main() {
    if std::process::id() != 1 {
        // A tool, run like any command: the same program, so that every image has it.
        std::process::exit(files::run(&std::env::args().skip(1).collect::<Vec<_>>()));
    }
    let end = match prepare() {
        Ok(server) => format!("the channel to the host broke: {}", server.serve()),
        Err(message) => message,
    };
    eprintln!("forktree-init: {end}");
    sys::end_machine()
}

fn prepare() -> Result<server::Server, String> {
    let port = boot::boot().map_err(|error| error.to_string())?;
    let failed = |step: &'static str| move |error: io::Error| format!("{step}: {error}");
    let group = workload_group::WorkloadGroup::create().map_err(failed("make the workload's control group"))?;
    let marks = identity::Marks::open()?;
    let signals = sys::child_signals().map_err(failed("listen for ends of processes"))?;
    sys::become_realtime().map_err(failed("become a real-time process"))?;
    let one_cpu = boot::has_one_cpu().map_err(failed("count the CPUs"))?;
    Ok(server::Server::new(port::Port::new(port), signals, group, marks, one_cpu))
}
