//! Requests in, replies out: what the shim's thread does. One request at a time, in the order they came.

use crate::layer::{allocate, read_table, Layer};
use crate::map::{map_runs, GuestRam};
use crate::protocol::{encode_reply, Packet, Refusal, Reply, Request, Run, PAGE_BYTES, REQUEST_MAX};
use crate::scan::{private_pages, RunTable, MAX_RUNS};
use crate::syscall;
use crate::track::{Counted, Tracker};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::io::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// One read of page map or run table: 16,384 pages or 8,192 runs.
const BUFFER_BYTES: usize = 128 << 10;
/// A mapping in the middle of another makes it three.
const VMAS_PER_RUN: u64 = 2;
/// Counting costs 0.8 us a mapping, on a child's way to its first instruction: below this the estimate will do.
const COUNT_ABOVE_VMAS: u64 = 15_000;

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        Self::Os { errno }
    }
}

/// Answer requests until the other end is closed for good.
pub fn serve(socket: &OwnedFd) {
    let mut shim = Shim::default();
    while let Ok(Some(letter)) = receive(socket) {
        let (header, request) = Request::decode(letter.packet());
        let outcome = match (request, letter.file) {
            (Some(request), file) if !letter.cut && request.wants_file() == file.is_some() => {
                shim.answer(request, file)
            }
            _ => Err(Refusal::Malformed),
        };
        if send(socket, &encode_reply(header, &outcome)).is_err() {
            return;
        }
    }
}

/// What the shim knows: nothing before HELLO.
#[derive(Default)]
struct Shim {
    guest: Option<Guest>,
}

impl Shim {
    fn answer(&mut self, request: Request, file: Option<File>) -> Result<Reply, Refusal> {
        if let Request::Hello { ram_bytes } = request {
            return self.hello(ram_bytes);
        }
        let guest = self.guest.as_mut().ok_or(Refusal::NoHello)?;
        match (request, file) {
            (Request::MapTable { table_offset, runs, copy_below }, Some(layer)) => {
                guest.map_table(&layer, table_offset, runs, copy_below)
            }
            (Request::MapRun(run), Some(layer)) => guest.map_run(&layer, run),
            (Request::Prepare { bytes }, Some(layer)) => guest.prepare(layer, bytes),
            (Request::Dump { gap_pages, target_runs, since, mark }, None) => {
                guest.dump(gap_pages, target_runs, since, mark)
            }
            (Request::Finish, None) => guest.finish(),
            (Request::Stat { since }, None) => guest.stat(since),
            (Request::Arm { since }, None) => guest.arm(since),
            (Request::Track, Some(device)) => guest.track(&device),
            (Request::Allocate { offset, bytes }, Some(file)) => guest.allocate(&file, offset, bytes),
            _ => Err(Refusal::Malformed),
        }
    }

    /// Once RAM is found it is not looked for again: maps over it have split it since.
    fn hello(&mut self, ram_bytes: u64) -> Result<Reply, Refusal> {
        let guest = match &mut self.guest {
            Some(guest) if guest.ram.bytes() == ram_bytes => guest,
            Some(_) => return Err(Refusal::RamNotFound { found: 0 }),
            None => {
                let ram = GuestRam::find(&std::fs::read("/proc/self/maps")?, ram_bytes)?;
                self.guest.insert(Guest::new(ram)?)
            }
        };
        guest.vmas = count_mappings(&mut guest.buffer)?;
        Ok(Reply::Ready { vmas: guest.vmas })
    }
}

/// The layer that the next dump fills.
enum NextLayer {
    None,
    Prepared(Layer),
    /// With its final size.
    Dumped(Layer, u64),
}

/// Guest RAM and all that a dump needs, taken at HELLO so that nothing is allocated while the VM stands still.
struct Guest {
    ram: GuestRam,
    pagemap: File,
    runs: RunTable,
    buffer: Vec<u8>,
    /// Mappings of this process, or more than there are.
    vmas: u64,
    next: NextLayer,
    /// None: nobody asked for it, or this kernel cannot.
    tracker: Option<Tracker>,
}

impl Guest {
    fn new(ram: GuestRam) -> Result<Self, Refusal> {
        let no_memory = |_| Refusal::Os { errno: libc::ENOMEM };
        let mut buffer = Vec::new();
        buffer.try_reserve_exact(BUFFER_BYTES).map_err(no_memory)?;
        buffer.resize(BUFFER_BYTES, 0);
        Ok(Self {
            ram,
            pagemap: File::open("/proc/self/pagemap")?,
            runs: RunTable::with_capacity(MAX_RUNS).map_err(no_memory)?,
            buffer,
            vmas: 0,
            next: NextLayer::None,
            tracker: None,
        })
    }

    fn need_private_ram(&self) -> Result<(), Refusal> {
        if self.ram.is_private() {
            Ok(())
        } else {
            Err(Refusal::RamShared)
        }
    }

    fn map_table(&mut self, layer: &File, table_offset: u64, runs: u32, copy_below: u32) -> Result<Reply, Refusal> {
        self.need_private_ram()?;
        let table = &mut self.runs;
        table.restart(0);
        if !read_table(layer, table_offset, runs, &mut self.buffer, |records| table.refill(records))? {
            return Err(Refusal::BadLayer);
        }
        self.forget_writes();
        let mapped = map_runs(&self.ram, self.runs.runs(), copy_below, layer, table_offset)?;
        Ok(self.mapped(mapped))
    }

    fn map_run(&mut self, layer: &File, run: Run) -> Result<Reply, Refusal> {
        self.need_private_ram()?;
        let metadata = layer.metadata()?;
        if !metadata.is_file() {
            return Err(Refusal::BadLayer);
        }
        self.forget_writes();
        let mapped = map_runs(&self.ram, &[run], 0, layer, metadata.len())?;
        Ok(self.mapped(mapped))
    }

    /// RAM is about to be mapped anew.
    fn forget_writes(&mut self) {
        if let Some(tracker) = &mut self.tracker {
            tracker.remapped();
        }
    }

    fn mapped(&mut self, runs: u64) -> Reply {
        self.vmas += runs * VMAS_PER_RUN;
        if self.vmas > COUNT_ABOVE_VMAS {
            // The maps are in place: not being able to count them must not read as if they were not.
            self.vmas = count_mappings(&mut self.buffer).unwrap_or(self.vmas);
        }
        Reply::Mapped { vmas: self.vmas }
    }

    fn prepare(&mut self, layer: File, bytes: u64) -> Result<Reply, Refusal> {
        self.need_private_ram()?;
        self.next = NextLayer::None;
        if bytes % PAGE_BYTES != 0 || bytes > self.longest_layer() {
            return Err(Refusal::BadLayer);
        }
        self.next = NextLayer::Prepared(Layer::prepare(layer, bytes)?);
        Ok(Reply::Done)
    }

    /// A layer that could not be filled is given up, and the next dump cannot be a difference; RAM is only read.
    fn dump(&mut self, gap_pages: u32, target_runs: u32, since: u64, mark: u64) -> Result<Reply, Refusal> {
        if mark != 0 && self.tracker.is_none() {
            return Err(Refusal::NotTracked);
        }
        let layer = match std::mem::replace(&mut self.next, NextLayer::None) {
            NextLayer::Prepared(layer) => layer,
            other => {
                self.next = other;
                return Err(Refusal::NoLayer);
            }
        };
        let start = Instant::now();
        self.runs.restart(gap_pages);
        let since = self.gather(since, mark)?;
        let table = &mut self.runs;
        table.settle(target_runs);
        table.pack();
        let scanned = Instant::now();
        let table_offset = layer.fill(&self.ram, table.runs(), &mut self.buffer)?;
        let runs = u32::try_from(table.runs().len()).map_err(|_| Refusal::BadLayer)?;
        let bytes = table_offset + u64::from(runs) * Run::BYTES as u64;
        self.next = NextLayer::Dumped(layer, bytes);
        if let (Some(tracker), true) = (&mut self.tracker, mark != 0) {
            tracker.settle(mark);
        }
        Ok(Reply::Dumped {
            pages: table.pages(),
            dirty_pages: table.dirty_pages(),
            table_offset,
            runs,
            gap_pages: table.gap_pages(),
            scan_ns: nanoseconds(scanned - start),
            copy_ns: nanoseconds(scanned.elapsed()),
            since,
        })
    }

    /// Add the pages of the next layer to the run table; returns the mark of the dump that it will be a difference to.
    fn gather(&mut self, since: u64, mark: u64) -> io::Result<u64> {
        let table = &mut self.runs;
        match &mut self.tracker {
            Some(tracker) if mark != 0 => {
                tracker.take(&self.pagemap, &self.ram, since, |first, pages| table.add(first, pages))
            }
            _ => {
                let (address, pages) = (self.ram.address(), self.ram.pages());
                private_pages(&self.pagemap, address, pages, &mut self.buffer, |page| table.add(page, 1))?;
                Ok(0)
            }
        }
    }

    fn finish(&mut self) -> Result<Reply, Refusal> {
        let (layer, bytes) = match std::mem::replace(&mut self.next, NextLayer::None) {
            NextLayer::Dumped(layer, bytes) => (layer, bytes),
            NextLayer::Prepared(layer) => (layer, 0),
            NextLayer::None => return Ok(Reply::Finished { bytes: 0 }),
        };
        layer.finish(bytes)?;
        Ok(Reply::Finished { bytes })
    }

    fn stat(&mut self, since: u64) -> Result<Reply, Refusal> {
        let Counted { private_pages, written_pages } = self.count(since)?;
        self.vmas = count_mappings(&mut self.buffer)?;
        Ok(Reply::Counted { vmas: self.vmas, private_pages, written_pages })
    }

    fn arm(&mut self, since: u64) -> Result<Reply, Refusal> {
        self.need_private_ram()?;
        let written_pages = match &mut self.tracker {
            Some(tracker) => tracker.arm(&self.pagemap, &self.ram, since)?,
            None => self.count(since)?.written_pages,
        };
        Ok(Reply::Armed { written_pages })
    }

    fn count(&mut self, since: u64) -> io::Result<Counted> {
        if let Some(tracker) = &mut self.tracker {
            return tracker.count(&self.pagemap, &self.ram, since);
        }
        let mut count = 0;
        let (address, pages) = (self.ram.address(), self.ram.pages());
        private_pages(&self.pagemap, address, pages, &mut self.buffer, |_| {
            count += 1;
        })?;
        Ok(Counted { private_pages: count, written_pages: count })
    }

    /// Once begun it goes on: a second agent asks again.
    fn track(&mut self, device: &File) -> Result<Reply, Refusal> {
        self.need_private_ram()?;
        if self.tracker.is_none() {
            let mut tracker = Tracker::new(device)?;
            // A kernel that has the one and not the other should say so now.
            tracker.count(&self.pagemap, &self.ram, 0)?;
            self.tracker = Some(tracker);
        }
        Ok(Reply::Done)
    }

    fn allocate(&self, file: &File, offset: u64, bytes: u64) -> Result<Reply, Refusal> {
        match offset.checked_add(bytes) {
            Some(end) if bytes > 0 && end <= self.longest_layer() => {
                allocate(file, offset, bytes)?;
                Ok(Reply::Done)
            }
            _ => Err(Refusal::BadLayer),
        }
    }

    /// More than all of RAM and the longest table can never be filled.
    fn longest_layer(&self) -> u64 {
        self.ram.bytes() + (MAX_RUNS * Run::BYTES) as u64
    }
}

fn count_mappings(buffer: &mut [u8]) -> io::Result<u64> {
    let mut maps = File::open("/proc/self/maps")?;
    let mut lines = 0;
    loop {
        let got = maps.read(buffer)?;
        if got == 0 {
            return Ok(lines);
        }
        let text = buffer.get(..got).unwrap_or(&[]);
        lines += text.split(|byte| *byte == b'\n').count() as u64 - 1;
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// One packet and the descriptor that came with it.
struct Letter {
    /// A byte more than a request needs, so that one too long is seen as such.
    bytes: [u8; REQUEST_MAX + 1],
    len: usize,
    file: Option<File>,
    /// More came than there was room for; the kernel has dropped it.
    cut: bool,
}

impl Letter {
    fn packet(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or(&[])
    }
}

/// A control message's header and one descriptor. Without the padding at its end, which would be room for another.
const CONTROL_BYTES: usize = 20;

#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

/// `None` at the end of the stream.
fn receive(socket: &OwnedFd) -> io::Result<Option<Letter>> {
    let mut letter = Letter { bytes: [0; REQUEST_MAX + 1], len: 0, file: None, cut: false };
    let mut control = Control([0; CONTROL_BYTES]);
    let mut part = libc::iovec { iov_base: letter.bytes.as_mut_ptr().cast(), iov_len: letter.bytes.len() };
    // SAFETY: All-zero is a valid msghdr: no name, no parts, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = control.0.len();
    let got = syscall::count(|| {
        // SAFETY: `message` points to `part` and `control`, which live to the end of this function, with their lengths.
        unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_CMSG_CLOEXEC) }
    })?;
    letter.file = attached(&message);
    letter.len = got;
    letter.cut = message.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0;
    Ok((got > 0).then_some(letter))
}

fn attached(message: &libc::msghdr) -> Option<File> {
    // SAFETY: `message` was filled by a recvmsg that succeeded, so its control data is well formed, and a first header,
    // if there is one, lies in the buffer. A descriptor in it is new in this process and nobody else's.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(message);
        let is_rights =
            !header.is_null() && (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS;
        if !is_rights {
            return None;
        }
        let fd = libc::CMSG_DATA(header).cast::<i32>().read_unaligned();
        Some(File::from_raw_fd(fd))
    }
}

fn send(socket: &OwnedFd, packet: &Packet) -> io::Result<()> {
    let bytes = packet.as_bytes();
    let (fd, start, len) = (socket.as_raw_fd(), bytes.as_ptr(), bytes.len());
    // SAFETY: The kernel reads `len` bytes of a slice that lives.
    syscall::count(|| unsafe { libc::send(fd, start.cast(), len, libc::MSG_NOSIGNAL) }).map(drop)
}
