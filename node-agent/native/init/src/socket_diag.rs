//! What the kernel is asked about sockets, and its answers (`sock_diag(7)`): bytes only, no system calls.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};

/// `SOCK_DIAG_BY_FAMILY` and `SOCK_DESTROY` of `linux/sock_diag.h`, `NLMSG_…` and `NLM_F_…` of `linux/netlink.h`.
const SOCKETS: u16 = 20;
const DESTROY: u16 = 21;
const ERROR: u16 = 2;
const DONE: u16 = 3;
const REQUEST: u16 = 1;
const DUMP: u16 = 0x300;

/// `struct nlmsghdr`; `struct inet_diag_req_v2`, whose last 48 bytes are an `inet_diag_sockid`; and where that is in
/// `struct inet_diag_msg`.
const HEADER_BYTES: usize = 16;
const REQUEST_BYTES: u32 = 72;
const ID_BYTES: usize = 48;
const ID_OFFSET: usize = HEADER_BYTES + 4;
const TIMER_OFFSET: usize = HEADER_BYTES + 2;

/// `idiag_timer` of what the kernel remembers of a connection that is over. No program holds it, whatever its state.
const TIME_WAIT_TIMER: u8 = 3;

/// States from `net/tcp_states.h`, as bits: all in which a TCP socket has a peer, but for `TIME_WAIT` (6).
const TCP_WITH_PEER: u32 = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 8 | 1 << 9 | 1 << 11;
/// A UDP socket that is connected counts as `ESTABLISHED`, any other as `CLOSE`.
const UDP_WITH_PEER: u32 = 1 << 1;

/// Sockets that are listed together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    is_ipv6: bool,
    is_udp: bool,
}

impl Kind {
    pub const ALL: [Self; 4] = [
        Self { is_ipv6: false, is_udp: false },
        Self { is_ipv6: true, is_udp: false },
        Self { is_ipv6: false, is_udp: true },
        Self { is_ipv6: true, is_udp: true },
    ];

    /// Ask for every socket of this kind that has a peer.
    pub fn list(self) -> Vec<u8> {
        let states = if self.is_udp { UDP_WITH_PEER } else { TCP_WITH_PEER };
        self.request(SOCKETS, REQUEST | DUMP, states, &SocketId::NONE)
    }

    /// Have the kernel end that one socket: whoever waits in it, or uses it later, gets `ECONNABORTED`. Only failures
    /// are answered.
    pub fn destroy(self, id: &SocketId) -> Vec<u8> {
        self.request(DESTROY, REQUEST, 0, id)
    }

    fn request(self, message: u16, flags: u16, states: u32, id: &SocketId) -> Vec<u8> {
        let family: u8 = if self.is_ipv6 { 10 } else { 2 }; // AF_INET6, AF_INET
        let protocol: u8 = if self.is_udp { 17 } else { 6 };
        let mut bytes = REQUEST_BYTES.to_ne_bytes().to_vec();
        bytes.extend(message.to_ne_bytes());
        bytes.extend(flags.to_ne_bytes());
        bytes.extend([0; 8]); // Sequence and port: each exchange is over before the next one.
        bytes.extend([family, protocol, 0, 0]);
        bytes.extend(states.to_ne_bytes());
        bytes.extend(id.0);
        bytes
    }

    /// Whether a socket's peer, or the socket itself, has a loopback address: neither leaves the machine.
    pub fn is_loopback(self, id: &SocketId) -> bool {
        [4, 20].iter().any(|offset| {
            let mut address = [0; 16];
            address.copy_from_slice(&id.0[*offset..*offset + 16]);
            let [a, b, c, d, ..] = address;
            let ipv6 = Ipv6Addr::from(address);
            match (self.is_ipv6, ipv6.to_ipv4_mapped()) {
                (false, _) => Ipv4Addr::new(a, b, c, d).is_loopback(),
                (true, Some(ipv4)) => ipv4.is_loopback(),
                (true, None) => ipv6.is_loopback(),
            }
        })
    }
}

/// `struct inet_diag_sockid`: ports, own and peer's address, interface, and a cookie, so that no other socket is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketId([u8; ID_BYTES]);

impl SocketId {
    /// That of no socket: no ports.
    pub const NONE: Self = Self([0; ID_BYTES]);
}

/// One message of the kernel's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    Socket(SocketId),
    /// The number is an `errno`; 0 is success.
    Failed(i32),
    /// All sockets have been listed.
    End,
}

/// The messages of one datagram. What does not have the lengths that it says is an error.
pub fn answers(datagram: &[u8]) -> io::Result<Vec<Answer>> {
    let mut answers = Vec::new();
    let mut rest = datagram;
    while !rest.is_empty() {
        let length = usize::try_from(u32::from_ne_bytes(field(rest, 0)?)).unwrap_or(usize::MAX);
        let message = rest.get(..length).filter(|message| message.len() >= HEADER_BYTES).ok_or_else(malformed)?;
        answers.extend(answer(message)?);
        // Each begins at a multiple of four; the last one may end without that.
        rest = rest.get((length + 3) & !3..).unwrap_or_default();
    }
    Ok(answers)
}

fn answer(message: &[u8]) -> io::Result<Option<Answer>> {
    match u16::from_ne_bytes(field(message, 4)?) {
        SOCKETS => {
            let id = SocketId(field(message, ID_OFFSET)?);
            let [timer] = field(message, TIMER_OFFSET)?;
            Ok((timer != TIME_WAIT_TIMER).then_some(Answer::Socket(id)))
        }
        ERROR => errno(message).map(|number| Some(Answer::Failed(number))),
        // With what came of the listing: a protocol whose module is missing, say.
        DONE => errno(message).map(|number| Some(if number == 0 { Answer::End } else { Answer::Failed(number) })),
        _ => Ok(None),
    }
}

fn errno(message: &[u8]) -> io::Result<i32> {
    // Negative in the message. What has no positive counterpart is no errno either.
    i32::from_ne_bytes(field(message, HEADER_BYTES)?).checked_neg().ok_or_else(malformed)
}

fn field<const BYTES: usize>(message: &[u8], offset: usize) -> io::Result<[u8; BYTES]> {
    let bytes = message.get(offset..offset + BYTES).ok_or_else(malformed)?;
    <[u8; BYTES]>::try_from(bytes).map_err(|_| malformed())
}

fn malformed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the kernel's answer about sockets has lengths that do not fit")
}

#[cfg(test)]
mod tests {
    use super::*;

    const TCP: Kind = Kind::ALL[0];
    const TCP_6: Kind = Kind::ALL[1];
    const UDP_6: Kind = Kind::ALL[3];

    fn id(own: [u8; 16], peer: [u8; 16]) -> SocketId {
        let mut bytes = [7; ID_BYTES];
        bytes[4..20].copy_from_slice(&own);
        bytes[20..36].copy_from_slice(&peer);
        SocketId(bytes)
    }

    fn ipv4(address: &str) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&address.parse::<Ipv4Addr>().expect("an address").octets());
        bytes
    }

    fn ipv6(address: &str) -> [u8; 16] {
        address.parse::<Ipv6Addr>().expect("an address").octets()
    }

    fn length(bytes: usize) -> [u8; 4] {
        u32::try_from(bytes).expect("few bytes").to_ne_bytes()
    }

    fn read(datagram: &[u8]) -> Vec<Answer> {
        answers(datagram).expect("lengths that fit")
    }

    fn message(kind: u16, body: &[u8]) -> Vec<u8> {
        let mut bytes = [&length(16 + body.len()), &kind.to_ne_bytes()[..], &[0; 10], body].concat();
        bytes.resize((bytes.len() + 3) & !3, 0);
        bytes
    }

    fn listed(id: &SocketId, timer: u8) -> Vec<u8> {
        // family, state, timer, retransmissions; then five numbers, and an attribute of one byte.
        message(SOCKETS, &[&[2, 1, timer, 0][..], &id.0, &[0; 20], &[5, 0, 8, 0, 0]].concat())
    }

    #[test]
    fn requests_have_the_kernels_layout() {
        let list = TCP.list();
        assert_eq!(list.len(), 72);
        assert_eq!(list[..4], 72_u32.to_ne_bytes());
        assert_eq!(list[4..8], [20_u16.to_ne_bytes(), 0x301_u16.to_ne_bytes()].concat());
        assert_eq!(list[16..20], [2, 6, 0, 0]);
        assert_eq!(list[20..24], 0b1011_0011_1110_u32.to_ne_bytes());
        let which = id(ipv6("fd00::1"), ipv6("fd00::2"));
        let destroy = UDP_6.destroy(&which);
        assert_eq!(destroy[4..8], [21_u16.to_ne_bytes(), 1_u16.to_ne_bytes()].concat());
        assert_eq!(destroy[16..20], [10, 17, 0, 0]);
        assert_eq!(destroy[24..], which.0);
    }

    #[test]
    fn loopback_is_told_from_everything_else_by_either_address() {
        let out = [ipv4("10.0.0.1"), ipv6("fd00::1")];
        let table = [
            (TCP, ipv4("127.0.0.1"), true),
            (TCP, ipv4("127.255.0.9"), true),
            (TCP, ipv4("128.0.0.1"), false),
            (TCP, ipv4("0.0.0.0"), false),
            (TCP_6, ipv6("::1"), true),
            (TCP_6, ipv6("::ffff:127.1.2.3"), true),
            (TCP_6, ipv6("::ffff:10.0.0.1"), false),
            (TCP_6, ipv6("::127.0.0.1"), false),
            (TCP_6, ipv6("7f00::1"), false),
            (TCP_6, ipv6("2001:db8::1"), false),
        ];
        for (kind, address, is_loopback) in table {
            let other = out[usize::from(kind.is_ipv6)];
            assert_eq!(kind.is_loopback(&id(other, address)), is_loopback, "{address:?}");
            assert_eq!(kind.is_loopback(&id(address, other)), is_loopback, "{address:?}");
        }
    }

    #[test]
    fn a_datagram_is_read_message_by_message() {
        let (one, two) = (id(ipv4("10.0.0.1"), ipv4("10.0.0.2")), id(ipv4("10.0.0.1"), ipv4("10.0.0.3")));
        let over = listed(&two, TIME_WAIT_TIMER);
        let parts = [listed(&one, 0), over, message(99, b"unknown"), listed(&two, 1), message(DONE, &[0; 4])];
        assert_eq!(read(&parts.concat()), [Answer::Socket(one), Answer::Socket(two), Answer::End]);
        let refused = message(ERROR, &[&(-2_i32).to_ne_bytes()[..], &[0; 72]].concat());
        assert_eq!(read(&refused), [Answer::Failed(2)]);
        assert_eq!(read(&message(DONE, &(-2_i32).to_ne_bytes())), [Answer::Failed(2)]);
        assert_eq!(read(&[]), []);
    }

    #[test]
    fn lengths_that_do_not_fit_are_errors() {
        let whole = listed(&id(ipv4("10.0.0.1"), ipv4("10.0.0.2")), 0);
        for said in [0, 1, 15, whole.len() + 1, 0x7fff_ffff, 0xffff_fffd, 0xffff_ffff] {
            let lied = [&length(said), &whole[4..]].concat();
            assert!(answers(&lied).is_err(), "{said}");
        }
        for cut in 1..whole.len() - 4 {
            assert!(answers(&whole[..cut]).is_err(), "cut to {cut}");
        }
        for short in [message(SOCKETS, &[0; 51]), message(ERROR, &[0; 3]), message(DONE, b"")] {
            assert!(answers(&short).is_err(), "{short:?}");
        }
        assert!(answers(&message(ERROR, &i32::MIN.to_ne_bytes())).is_err());
    }
}
