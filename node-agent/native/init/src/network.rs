//! The way to the outside, in a machine that was given one: address, route and resolver, all as the command line says.
//!
//! They are the same in every machine, whose other end is a process of its own. So a child of a fork keeps what its
//! parent was frozen with, and has nothing to ask for.

use crate::sys;
use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::path::Path;
use std::str::FromStr;

/// As `forktree.network=ADDRESS/PREFIX,GATEWAY,RESOLVER` of the kernel command line gives it.
#[derive(Debug, PartialEq, Eq)]
pub struct Network {
    address: Ipv4Addr,
    netmask: Ipv4Addr,
    gateway: Ipv4Addr,
    resolver: Ipv4Addr,
}

/// Folder of the initramfs with the drivers that only such a machine needs.
pub const MODULES: &str = "/modules/network";

/// There is one network device, and nobody renames it.
const INTERFACE: &str = "eth0";

impl Network {
    /// What the command line gives; `Ok(None)` where it does not speak of any.
    pub fn asked_for(command_line: &str) -> io::Result<Option<Self>> {
        let mut values = command_line.split_whitespace().filter_map(|word| word.strip_prefix("forktree.network="));
        values.next().map(str::parse).transpose()
    }

    /// Set it up, once the root file system and the device are there.
    pub fn set_up(&self) -> io::Result<()> {
        sys::interface_up(INTERFACE, Some((self.address, self.netmask)))?;
        sys::default_route(self.gateway)?;
        let file = Path::new("/etc/resolv.conf");
        fs::create_dir_all("/etc")?;
        match fs::remove_file(file) {
            // In many an image it leads to the file of a service that does not run here.
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => fs::write(file, format!("nameserver {}\n", self.resolver)),
        }
    }
}

impl FromStr for Network {
    type Err = io::Error;

    fn from_str(text: &str) -> io::Result<Self> {
        let parsed = || {
            let mut parts = text.split(',');
            let (address, prefix) = parts.next()?.split_once('/')?;
            let prefix: u32 = prefix.parse().ok().filter(|bits| (1..=32).contains(bits))?;
            let network = Self {
                address: address.parse().ok()?,
                netmask: Ipv4Addr::from(u32::MAX << (32 - prefix)),
                gateway: parts.next()?.parse().ok()?,
                resolver: parts.next()?.parse().ok()?,
            };
            parts.next().is_none().then_some(network)
        };
        let malformed = || io::Error::new(io::ErrorKind::InvalidInput, "not ADDRESS/PREFIX,GATEWAY,RESOLVER");
        parsed().ok_or_else(malformed)
    }
}

#[cfg(test)]
mod tests {
    use super::Network;
    use std::net::Ipv4Addr;

    #[test]
    fn the_network_is_what_the_command_line_says() {
        let read = Network::asked_for("quiet forktree.network=198.18.0.2/29,198.18.0.1,198.18.0.3 panic=-1\n");
        let expected = Network {
            address: Ipv4Addr::new(198, 18, 0, 2),
            netmask: Ipv4Addr::new(255, 255, 255, 248),
            gateway: Ipv4Addr::new(198, 18, 0, 1),
            resolver: Ipv4Addr::new(198, 18, 0, 3),
        };
        assert_eq!(read.ok(), Some(Some(expected)));
    }

    #[test]
    fn without_one_there_is_none_and_a_malformed_one_is_refused() {
        assert!(matches!(Network::asked_for("quiet"), Ok(None)));
        for value in [
            "",
            "1.2.3.4",
            "1.2.3.4/0,1.1.1.1,1.1.1.1",
            "1.2.3.4/33,1.1.1.1,1.1.1.1",
            "1.2.3.4/8,1.1.1.1",
            "1.2.3.4/8,1.1.1.1,1.1.1.1,1.1.1.1",
        ] {
            assert!(Network::asked_for(&format!("forktree.network={value}")).is_err(), "{value}");
        }
    }
}
