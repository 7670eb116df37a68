//! The packets between the agent and the shim, and the record of a run inside a layer.
//!
//! One packet is one request or one reply: fixed little-endian structs over a SEQPACKET socket, so no packet
//! can be half-read and a new agent can go on where a dead one stopped. A reply repeats its request's id; the
//! agent drops replies to ids that are not its own. `tests/golden/shim_packets.txt` holds one of each kind,
//! read by this module's tests and by those of `shim.py`. Pure: nothing here touches the process.

/// Of the whole protocol; a request of another version is refused as malformed.
pub const VERSION: u16 = 2;
/// Longest request: a header and a dump's four fields.
pub const REQUEST_MAX: usize = 32;
/// Longest reply: a header, status and errno, and a dump's report.
pub const REPLY_MAX: usize = 72;
/// The unit of runs, offsets and tables. The build is for x86-64, where base pages have this size.
pub const PAGE_BYTES: u64 = 4096;

/// Guest pages that lie together in one layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Run {
    /// First guest page.
    pub page: u32,
    /// How many pages; never 0 in a valid run.
    pub pages: u32,
    /// Where the first page lies in the layer, in bytes.
    pub offset: u64,
}

impl Run {
    /// Size of the record in a layer's run table.
    pub const BYTES: usize = 16;

    /// Length in bytes: below 2^44, so sums with checked offsets cannot wrap.
    pub fn bytes(&self) -> u64 {
        u64::from(self.pages) * PAGE_BYTES
    }

    /// First guest page after the run.
    pub fn end(&self) -> u64 {
        u64::from(self.page) + u64::from(self.pages)
    }

    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut record = Record::<{ Self::BYTES }>::new();
        record.u32(self.page).u32(self.pages).u64(self.offset);
        record.bytes
    }

    /// `None` if `record` has another size than a run.
    pub fn decode(record: &[u8]) -> Option<Self> {
        let mut fields = Fields(record);
        let run = fields.run()?;
        fields.end()?;
        Some(run)
    }
}

/// What comes first in every packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    pub op: u16,
    /// Chosen by the agent, repeated in the reply.
    pub id: u32,
}

/// What the agent asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Find guest RAM by its size. May be repeated with the same size, as an adopting agent does.
    Hello { ram_bytes: u64 },
    /// Back guest RAM by the runs in the attached layer's own table. Those of fewer than `copy_below` pages are copied.
    MapTable { table_offset: u64, runs: u32, copy_below: u32 },
    /// Back guest RAM by one run of the attached file.
    MapRun(Run),
    /// Take the attached, empty memfd as the next layer, with `bytes` of it really there.
    Prepare { bytes: u64 },
    /// Copy the pages written since the dump marked `since` into the prepared layer, or, if that is 0 or not the last
    /// dump, every page that is private to this VM. With a `mark` other than 0 the next dump can be a difference to
    /// this one; only while writes are tracked. The VM is stopped.
    Dump { gap_pages: u32, target_runs: u32, since: u64, mark: u64 },
    /// Let go of the prepared layer, cut to what was dumped into it. Without one there is nothing to do, so it is
    /// also how an adopting agent ends whatever the agent before it had begun.
    Finish,
    /// Count mappings, private pages, and those of them that a dump since `since` would copy.
    Stat { since: u64 },
    /// Note from here on what is written. The attached file is `/dev/userfaultfd`. May be repeated.
    Track,
    /// Have these bytes of the attached memfd really there. As with a layer that is prepared, they are charged to this
    /// process's control group, whoever fills them.
    Allocate { offset: u64, bytes: u64 },
    /// Make ready for a dump since `since`, and count what it would copy. The VM may run.
    Arm { since: u64 },
}

impl Request {
    /// Whether the request comes with exactly one descriptor; the others come with none.
    pub fn wants_file(&self) -> bool {
        match self {
            Self::MapTable { .. } | Self::MapRun(_) | Self::Prepare { .. } | Self::Track | Self::Allocate { .. } => {
                true
            }
            Self::Hello { .. } | Self::Dump { .. } | Self::Finish | Self::Stat { .. } | Self::Arm { .. } => false,
        }
    }

    /// The header as far as it could be read, and the request if all of the packet could.
    pub fn decode(packet: &[u8]) -> (Header, Option<Self>) {
        let mut fields = Fields(packet);
        let head = fields.u16().zip(fields.u16()).zip(fields.u32());
        let ((version, op), id) = match head {
            Some(head) => head,
            None => return (Header::default(), None),
        };
        let request = if version == VERSION { Self::decode_body(op, fields) } else { None };
        (Header { op, id }, request)
    }

    fn decode_body(op: u16, mut fields: Fields<'_>) -> Option<Self> {
        let request = match op {
            1 => Self::Hello { ram_bytes: fields.u64()? },
            2 => Self::MapTable { table_offset: fields.u64()?, runs: fields.u32()?, copy_below: fields.u32()? },
            3 => Self::MapRun(fields.run()?),
            4 => Self::Prepare { bytes: fields.u64()? },
            5 => Self::Dump {
                gap_pages: fields.u32()?,
                target_runs: fields.u32()?,
                since: fields.u64()?,
                mark: fields.u64()?,
            },
            6 => Self::Finish,
            7 => Self::Stat { since: fields.u64()? },
            8 => Self::Track,
            9 => Self::Allocate { offset: fields.u64()?, bytes: fields.u64()? },
            10 => Self::Arm { since: fields.u64()? },
            _ => return None,
        };
        fields.end()?;
        Some(request)
    }
}

/// What a request that was carried out answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    Ready {
        /// Mappings of this process.
        vmas: u64,
    },
    Mapped {
        /// At most this many mappings: what is added is estimated, and counted only when it matters.
        vmas: u64,
    },
    /// Of a request that leaves nothing to be told.
    Done,
    Dumped {
        /// Pages in the layer: the dirty ones, and clean ones in gaps between them.
        pages: u64,
        dirty_pages: u64,
        table_offset: u64,
        runs: u32,
        /// The gap that was used in the end; wider than asked for where runs were too many.
        gap_pages: u32,
        scan_ns: u64,
        copy_ns: u64,
        /// The mark of the dump that this one is a difference to; 0: every private page is in it.
        since: u64,
    },
    Finished {
        bytes: u64,
    },
    Counted {
        vmas: u64,
        private_pages: u64,
        written_pages: u64,
    },
    Armed {
        written_pages: u64,
    },
}

/// Why a request was not carried out. Only after `HalfMapped` is anything in guest RAM changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Unknown version or op, wrong length, a descriptor too few or too many.
    Malformed,
    /// HELLO has to come first.
    NoHello,
    /// Not exactly one file mapping has RAM's size: this many have.
    RamNotFound { found: u64 },
    /// RAM is a shared mapping, so pages written to it are not private to this VM.
    RamShared,
    /// The file is no layer: too short for its table, or more runs than one layer may have.
    BadLayer,
    /// This run of the table does not lie in RAM, in the layer, on page borders or in ascending order.
    BadRun { index: u64 },
    /// DUMP before PREPARE, or twice.
    NoLayer,
    /// The system said no. A layer that was being prepared or dumped is given up.
    Os { errno: i32 },
    /// The system said no at this run, after others were mapped: this VM must be killed.
    HalfMapped { errno: i32, index: u64 },
    /// DUMP with a mark before TRACK.
    NotTracked,
}

/// One reply, ready to be sent.
pub fn encode_reply(header: Header, outcome: &Result<Reply, Refusal>) -> Packet {
    let mut packet = Record::<REPLY_MAX>::new();
    packet.u16(VERSION).u16(header.op).u32(header.id);
    match *outcome {
        Ok(reply) => encode_success(&mut packet, reply),
        Err(refusal) => encode_refusal(&mut packet, refusal),
    }
    packet
}

fn encode_success(packet: &mut Packet, reply: Reply) {
    packet.u32(0).u32(0);
    match reply {
        Reply::Done => {}
        Reply::Ready { vmas } | Reply::Mapped { vmas } => {
            packet.u64(vmas);
        }
        Reply::Dumped { pages, dirty_pages, table_offset, runs, gap_pages, scan_ns, copy_ns, since } => {
            packet.u64(pages).u64(dirty_pages).u64(table_offset);
            packet.u32(runs).u32(gap_pages).u64(scan_ns).u64(copy_ns).u64(since);
        }
        Reply::Finished { bytes } => {
            packet.u64(bytes);
        }
        Reply::Armed { written_pages } => {
            packet.u64(written_pages);
        }
        Reply::Counted { vmas, private_pages, written_pages } => {
            packet.u64(vmas).u64(private_pages).u64(written_pages);
        }
    }
}

fn encode_refusal(packet: &mut Packet, refusal: Refusal) {
    let (status, errno, detail) = match refusal {
        Refusal::Malformed => (1, 0, 0),
        Refusal::NoHello => (2, 0, 0),
        Refusal::RamNotFound { found } => (3, 0, found),
        Refusal::RamShared => (4, 0, 0),
        Refusal::BadLayer => (5, 0, 0),
        Refusal::BadRun { index } => (6, 0, index),
        Refusal::NoLayer => (7, 0, 0),
        Refusal::Os { errno } => (8, errno, 0),
        Refusal::HalfMapped { errno, index } => (9, errno, index),
        Refusal::NotTracked => (10, 0, 0),
    };
    packet.u32(status).i32(errno).u64(detail);
}

/// A reply's bytes.
pub type Packet = Record<REPLY_MAX>;

/// Writes fields into a fixed buffer. What does not fit is left out: the golden tests would show it.
pub struct Record<const N: usize> {
    bytes: [u8; N],
    used: usize,
}

impl<const N: usize> Record<N> {
    fn new() -> Self {
        Self { bytes: [0; N], used: 0 }
    }

    /// What was written.
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.used).unwrap_or(&[])
    }

    fn put(&mut self, field: &[u8]) -> &mut Self {
        let end = self.used + field.len();
        if let Some(room) = self.bytes.get_mut(self.used..end) {
            room.copy_from_slice(field);
            self.used = end;
        }
        self
    }

    fn u16(&mut self, value: u16) -> &mut Self {
        self.put(&value.to_le_bytes())
    }

    fn u32(&mut self, value: u32) -> &mut Self {
        self.put(&value.to_le_bytes())
    }

    fn i32(&mut self, value: i32) -> &mut Self {
        self.put(&value.to_le_bytes())
    }

    fn u64(&mut self, value: u64) -> &mut Self {
        self.put(&value.to_le_bytes())
    }
}

/// Reads fields off the front of a packet.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        if self.0.len() < N {
            return None;
        }
        let (field, rest) = self.0.split_at(N);
        self.0 = rest;
        field.try_into().ok()
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn run(&mut self) -> Option<Run> {
        Some(Run { page: self.u32()?, pages: self.u32()?, offset: self.u64()? })
    }

    fn end(&self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    const GOLDEN: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../tests/golden/shim_packets.txt"));

    struct Golden {
        name: &'static str,
        fields: HashMap<&'static str, u64>,
        bytes: Vec<u8>,
    }

    impl Golden {
        fn u64(&self, field: &str) -> u64 {
            self.fields[field]
        }

        fn u32(&self, field: &str) -> u32 {
            u32::try_from(self.fields[field]).expect("a 32-bit field")
        }

        fn errno(&self) -> i32 {
            i32::try_from(self.fields["errno"]).expect("an errno")
        }
    }

    /// Lines of `name field=value … = hex hex …`.
    fn golden() -> Vec<Golden> {
        let lines = GOLDEN.lines().filter(|line| !line.starts_with('#'));
        lines.filter(|line| !line.is_empty()).map(parse).collect()
    }

    fn parse(line: &'static str) -> Golden {
        let (left, right) = line.split_once(" = ").expect("fields = bytes");
        let mut words = left.split(' ');
        let name = words.next().expect("a name");
        let fields = words
            .map(|word| word.split_once('=').expect("field=value"))
            .map(|(field, value)| (field, value.parse().expect("a number")))
            .collect();
        let digits: String = right.split(' ').collect();
        let bytes =
            (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).expect("hex")).collect();
        Golden { name, fields, bytes }
    }

    fn run_of(golden: &Golden) -> Run {
        Run { page: golden.u32("page"), pages: golden.u32("pages"), offset: golden.u64("offset") }
    }

    fn request_of(golden: &Golden) -> Option<Request> {
        Some(match golden.name {
            "hello" => Request::Hello { ram_bytes: golden.u64("ram_bytes") },
            "map_table" => Request::MapTable {
                table_offset: golden.u64("table_offset"),
                runs: golden.u32("runs"),
                copy_below: golden.u32("copy_below"),
            },
            "map_run" => Request::MapRun(run_of(golden)),
            "prepare" => Request::Prepare { bytes: golden.u64("bytes") },
            "dump" => Request::Dump {
                gap_pages: golden.u32("gap_pages"),
                target_runs: golden.u32("target_runs"),
                since: golden.u64("since"),
                mark: golden.u64("mark"),
            },
            "finish" => Request::Finish,
            "stat" => Request::Stat { since: golden.u64("since") },
            "track" => Request::Track,
            "arm" => Request::Arm { since: golden.u64("since") },
            "allocate" => Request::Allocate { offset: golden.u64("offset"), bytes: golden.u64("bytes") },
            _ => return None,
        })
    }

    fn outcome_of(golden: &Golden) -> Option<Result<Reply, Refusal>> {
        Some(match golden.name {
            "ready" => Ok(Reply::Ready { vmas: golden.u64("vmas") }),
            "prepared" | "tracked" | "allocated" => Ok(Reply::Done),
            "mapped" => Ok(Reply::Mapped { vmas: golden.u64("vmas") }),
            "dumped" => Ok(Reply::Dumped {
                pages: golden.u64("pages"),
                dirty_pages: golden.u64("dirty_pages"),
                table_offset: golden.u64("table_offset"),
                runs: golden.u32("runs"),
                gap_pages: golden.u32("gap_pages"),
                scan_ns: golden.u64("scan_ns"),
                copy_ns: golden.u64("copy_ns"),
                since: golden.u64("since"),
            }),
            "finished" => Ok(Reply::Finished { bytes: golden.u64("bytes") }),
            "armed" => Ok(Reply::Armed { written_pages: golden.u64("written_pages") }),
            "counted" => Ok(Reply::Counted {
                vmas: golden.u64("vmas"),
                private_pages: golden.u64("private_pages"),
                written_pages: golden.u64("written_pages"),
            }),
            "malformed" => Err(Refusal::Malformed),
            "no_hello" => Err(Refusal::NoHello),
            "ram_not_found" => Err(Refusal::RamNotFound { found: golden.u64("detail") }),
            "ram_shared" => Err(Refusal::RamShared),
            "bad_layer" => Err(Refusal::BadLayer),
            "bad_run" => Err(Refusal::BadRun { index: golden.u64("detail") }),
            "no_layer" => Err(Refusal::NoLayer),
            "os" => Err(Refusal::Os { errno: golden.errno() }),
            "half_mapped" => Err(Refusal::HalfMapped { errno: golden.errno(), index: golden.u64("detail") }),
            "not_tracked" => Err(Refusal::NotTracked),
            _ => return None,
        })
    }

    #[test]
    fn golden_packets_are_what_both_sides_say_they_are() {
        let mut seen = [0; 3];
        for golden in golden() {
            if let Some(request) = request_of(&golden) {
                let (header, decoded) = Request::decode(&golden.bytes);
                assert_eq!(decoded, Some(request), "{}", golden.name);
                assert_eq!(header.id, golden.u32("id"), "{}", golden.name);
                seen[0] += 1;
            } else if let Some(outcome) = outcome_of(&golden) {
                let op = u16::try_from(golden.u64("op")).expect("an op");
                let id = golden.u32("id");
                let packet = encode_reply(Header { op, id }, &outcome);
                assert_eq!(packet.as_bytes(), golden.bytes, "{}", golden.name);
                seen[1] += 1;
            } else {
                assert_eq!(golden.name, "run");
                assert_eq!(run_of(&golden).encode().as_slice(), golden.bytes);
                assert_eq!(Run::decode(&golden.bytes), Some(run_of(&golden)));
                seen[2] += 1;
            }
        }
        assert_eq!(seen, [10, 19, 1]);
    }

    #[test]
    fn a_request_cut_or_lengthened_anywhere_is_refused_but_keeps_its_id() {
        for golden in golden() {
            if request_of(&golden).is_none() {
                continue;
            }
            let mut longer = golden.bytes.clone();
            longer.push(0);
            assert_eq!(Request::decode(&longer).1, None, "{}", golden.name);
            for len in 0..golden.bytes.len() {
                let (header, request) = Request::decode(&golden.bytes[..len]);
                assert_eq!(request, None, "{} cut at {}", golden.name, len);
                assert_eq!(header.id == golden.u32("id"), len >= 8);
            }
        }
    }

    #[test]
    fn another_version_and_unknown_ops_are_refused() {
        assert_eq!(Request::decode(&[2, 0, 6, 0, 5, 0, 0, 0]).1, Some(Request::Finish));
        assert_eq!(Request::decode(&[1, 0, 6, 0, 5, 0, 0, 0]).1, None);
        for op in (0..=u8::MAX).filter(|op| !(1..=10).contains(op)) {
            assert_eq!(Request::decode(&[2, 0, op, 0, 5, 0, 0, 0]).1, None);
        }
    }

    proptest! {
        #[test]
        fn whatever_comes_is_a_request_or_none(packet in proptest::collection::vec(any::<u8>(), 0..80)) {
            let (header, request) = Request::decode(&packet);
            prop_assert!(request.is_none() || packet.len() <= REQUEST_MAX);
            if packet.len() >= 8 {
                prop_assert_eq!(header.id.to_le_bytes().to_vec(), packet[4..8].to_vec());
            }
        }

        #[test]
        fn a_request_of_any_numbers_is_read_or_refused(op in 0_u16..14, body in proptest::collection::vec(any::<u8>(), 0..30)) {
            let mut packet = VERSION.to_le_bytes().to_vec();
            packet.extend(op.to_le_bytes());
            packet.extend([7, 0, 0, 0]);
            packet.extend(&body);
            let (header, _) = Request::decode(&packet);
            prop_assert_eq!((header.op, header.id), (op, 7));
        }

        #[test]
        fn a_run_of_any_numbers_has_an_end_that_does_not_wrap(record in proptest::collection::vec(any::<u8>(), 16)) {
            let run = Run::decode(&record).expect("as long as a run");
            prop_assert!(run.end() >= u64::from(run.page));
            prop_assert!(run.bytes() < 1 << 44);
            prop_assert_eq!(run.encode().to_vec(), record);
        }
    }
}
