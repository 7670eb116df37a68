//! Which pages were written since the dump before: the kernel keeps count, so a machine that is forked again copies
//! what is new and not all that it ever wrote.
//!
//! A page that went into a layer is write-protected; the first write to it takes the protection off again, without
//! anybody being asked (userfaultfd, `WP_ASYNC`). `PAGEMAP_SCAN` reads which pages have none and protects them in one
//! go, page by page under the kernel's own lock, so no write falls between the two. Both came with Linux 6.7.
//!
//! To tell a private page from one of a file the kernel looks at each, 55 ns; whether it is protected it sees at once. So
//! pages of files are protected ahead of a dump, by `arm`, and what is without protection in the stopped machine is what
//! goes into the layer. Pages of files that were first read in between go with it: they are what the layers have anyway.
//!
//! What a dump leaves out is right only for whoever has the layer of the dump before it. So every dump has a mark, and
//! a difference is made to the mark that was asked for or not at all.

use crate::map::GuestRam;
use crate::protocol::PAGE_BYTES;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::io::{AsRawFd, FromRawFd, OwnedFd};

/// Found by one system call; where there are more, another goes on from there.
const REGIONS: usize = 4_096;

/// Stretches of pages, to be looked at one by one, and how far apart they are at least: two that are nearer take less
/// time together.
const WINDOWS: usize = 64;
const WINDOW_GAP: u32 = 64;

const USERFAULTFD_IOC_NEW: u64 = 0xaa00;
const UFFDIO_API: u64 = 0xc018_aa3f;
const UFFDIO_REGISTER: u64 = 0xc020_aa00;
const PAGEMAP_SCAN: u64 = 0xc060_6610;

const UFFD_API: u64 = 0xaa;
/// The kernel's own accesses never wait for whoever has the descriptor, were it a guest that broke out.
const USER_MODE_ONLY: i32 = 1;
const FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
const FEATURE_WP_ASYNC: u64 = 1 << 15;
const REGISTER_MODE_WP: u64 = 1 << 1;

const SCAN_PROTECT: u64 = 1 << 0;
/// Fail on memory that is not registered. Without it a protecting scan passes over that without a word.
const SCAN_MUST_BE_REGISTERED: u64 = 1 << 1;

const WRITTEN: u64 = 1 << 1;
const FILE: u64 = 1 << 2;
const PRESENT: u64 = 1 << 3;
const SWAPPED: u64 = 1 << 4;

#[repr(C)]
struct Api {
    version: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Register {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// Pages that are alike, as the kernel reports them: addresses and categories.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// What a scan is to find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    /// Every private page.
    Private,
    /// Pages of files without protection.
    OpenFiles,
    /// Pages without protection, whatever they are.
    Open,
}

/// Write tracking of guest RAM. Ends, and leaves no page protected, when it is dropped.
#[derive(Debug)]
pub struct Tracker {
    uffd: OwnedFd,
    regions: Vec<Region>,
    registered: bool,
    /// No private page was ever protected, so all of them are without protection.
    pristine: bool,
    /// The dump since when writes are known. None before the first, and after one whose layer was not made.
    mark: Option<u64>,
}

/// How many private pages there are, and how many of them were written since a mark.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    pub private_pages: u64,
    pub written_pages: u64,
}

impl Tracker {
    /// `device` is `/dev/userfaultfd`, which only root may open: the system call is refused to this process. An error
    /// is a kernel that cannot do it.
    pub fn new(device: &File) -> io::Result<Self> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | USER_MODE_ONLY;
        // SAFETY: No memory of ours is involved. Another file than the device knows no such request: ENOTTY.
        let fd = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: The kernel has just made this descriptor, and nobody else knows of it.
        let uffd = unsafe { OwnedFd::from_raw_fd(fd) };
        let mut api = Api { version: UFFD_API, features: FEATURE_PAGEFAULT_FLAG_WP | FEATURE_WP_ASYNC, ioctls: 0 };
        // SAFETY: `api` has the kernel's layout and outlives the call.
        if unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_API, std::ptr::addr_of_mut!(api)) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let mut regions = Vec::new();
        regions.try_reserve_exact(REGIONS).map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM))?;
        regions.resize(REGIONS, Region::default());
        Ok(Self { uffd, regions, registered: false, pristine: true, mark: None })
    }

    /// Guest RAM has new mappings, which the kernel does not watch and whose pages are nobody's writes.
    pub fn remapped(&mut self) {
        self.registered = false;
        self.mark = None;
    }

    /// Make ready for a dump that is about to come, so that it takes less time. The machine may run. Returns how many
    /// pages such a dump would copy, since the dump `since`, if it came now.
    pub fn arm(&mut self, pagemap: &File, ram: &GuestRam, since: u64) -> io::Result<u64> {
        self.register(ram)?;
        let all = 0..ram.pages();
        let mut windows: Vec<Range<u32>> = Vec::with_capacity(WINDOWS);
        self.scan(pagemap, ram, all.clone(), Wanted::Open, Protect::No, |page, pages, _| {
            let full = windows.len() == WINDOWS;
            match windows.last_mut() {
                Some(last) if full || page - last.end <= WINDOW_GAP => last.end = page + pages,
                _ => windows.push(page..page + pages),
            }
        })?;
        for window in windows {
            self.scan(pagemap, ram, window, Wanted::OpenFiles, Protect::Yes, |_, _, _| {})?;
        }
        let mut written = 0;
        let wanted = if self.is_new(since) { Wanted::Open } else { Wanted::Private };
        self.scan(pagemap, ram, all, wanted, Protect::No, |_, pages, _| written += u64::from(pages))?;
        Ok(written)
    }

    /// Have the kernel watch all of RAM, 0.2 us a mapping. What was written before counts as written.
    ///
    /// Not before it is needed: pages of files are no longer mapped sixteen at a time then, which a machine that was
    /// just born would feel.
    fn register(&mut self, ram: &GuestRam) -> io::Result<()> {
        if self.registered {
            return Ok(());
        }
        let mut register = Register { start: ram.address(), len: ram.bytes(), mode: REGISTER_MODE_WP, ioctls: 0 };
        let at = std::ptr::addr_of_mut!(register);
        // SAFETY: `register` has the kernel's layout and outlives the call. Nobody has to answer faults in the range:
        // with WP_ASYNC the kernel itself takes the protection off.
        if unsafe { libc::ioctl(self.uffd.as_raw_fd(), UFFDIO_REGISTER, at) } != 0 {
            return Err(io::Error::last_os_error());
        }
        self.registered = true;
        Ok(())
    }

    /// Calls `found` with the first page and the number of pages of every stretch written since the dump `since`, or,
    /// if that is not the last dump whose layer was made, of every stretch that is private. All of them count as not
    /// written from here on, so the caller says by `settle` when the layer is made.
    ///
    /// Returns the mark that the difference is made to: `since`, or 0.
    pub fn take(&mut self, pagemap: &File, ram: &GuestRam, since: u64, found: impl FnMut(u32, u32)) -> io::Result<u64> {
        self.register(ram)?;
        let wanted = if self.is_new(since) { Wanted::Open } else { Wanted::Private };
        let base = if self.knows(since) { since } else { 0 };
        self.mark = None;
        self.pristine = false;
        let mut found = found;
        self.scan(pagemap, ram, 0..ram.pages(), wanted, Protect::Yes, |first, pages, _| found(first, pages))?;
        Ok(base)
    }

    /// The layer of the pages taken last is made: the next difference can be to it.
    pub fn settle(&mut self, mark: u64) {
        self.mark = Some(mark);
    }

    /// The private pages, and those of them that `take` would find. Changes nothing; the machine may run.
    pub fn count(&mut self, pagemap: &File, ram: &GuestRam, since: u64) -> io::Result<Counted> {
        let known = self.knows(since);
        let mut counted = Counted::default();
        self.scan(pagemap, ram, 0..ram.pages(), Wanted::Private, Protect::No, |_, pages, written| {
            counted.private_pages += u64::from(pages);
            if written || !known {
                counted.written_pages += u64::from(pages);
            }
        })?;
        Ok(counted)
    }

    fn knows(&self, since: u64) -> bool {
        since != 0 && self.mark == Some(since)
    }

    /// Whether exactly the pages without protection are new since the dump `since`, or since birth.
    fn is_new(&self, since: u64) -> bool {
        self.pristine || self.knows(since)
    }

    /// Calls `found` with first page, pages, and whether they have no protection, for what is wanted of `pages`.
    ///
    /// After an error some pages may be protected that nobody was told of. Not asked again when it is interrupted:
    /// only the end of this process does that, and pages already told of would be passed over.
    fn scan(
        &mut self,
        pagemap: &File,
        ram: &GuestRam,
        pages: Range<u32>,
        wanted: Wanted,
        protect: Protect,
        mut found: impl FnMut(u32, u32, bool),
    ) -> io::Result<()> {
        let first = ram.address();
        let address = |page| first + u64::from(page) * PAGE_BYTES;
        let (mut start, end) = (address(pages.start), address(pages.end));
        while start < end {
            let mut scan = wanted.request(protect, start, end, &mut self.regions);
            let at = std::ptr::addr_of_mut!(scan);
            // SAFETY: `scan` has the kernel's layout; it and the regions that it points to, `vec_len` of them, live and
            // are borrowed by nobody else until the call returns.
            let count = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, at) };
            let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
            let regions = self.regions.get(..count).unwrap_or(&[]);
            for region in regions {
                let pages = (region.end - region.start) / PAGE_BYTES;
                let page = (region.start - first) / PAGE_BYTES;
                match (u32::try_from(page), u32::try_from(pages)) {
                    (Ok(page), Ok(pages)) => found(page, pages, region.categories & WRITTEN != 0),
                    _ => return Err(io::ErrorKind::InvalidData.into()),
                }
            }
            // Not `walk_end`: where more than 512 regions were found it lies before the last of them (seen in 6.18), and
            // those would be found again.
            start = match regions.last() {
                Some(last) if regions.len() == self.regions.len() => last.end,
                _ => end,
            };
        }
        Ok(())
    }
}

/// Whether what a scan finds is protected from here on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protect {
    No,
    Yes,
}

impl Wanted {
    /// Private pages are those that are there, in memory or swapped out, and not of a file. Results are always asked
    /// for: a scan that protects and wants none protects every page, whatever it was told to look for.
    fn request(self, protect: Protect, start: u64, end: u64, regions: &mut [Region]) -> Scan {
        let (inverted, mask) = match self {
            Self::Private => (FILE, FILE),
            Self::OpenFiles => (0, FILE | WRITTEN),
            Self::Open => (0, WRITTEN),
        };
        Scan {
            size: std::mem::size_of::<Scan>() as u64,
            flags: if protect == Protect::Yes { SCAN_PROTECT | SCAN_MUST_BE_REGISTERED } else { 0 },
            start,
            end,
            walk_end: 0,
            vec: regions.as_mut_ptr() as u64,
            vec_len: regions.len() as u64,
            max_pages: 0,
            category_inverted: inverted,
            category_mask: mask,
            category_anyof_mask: PRESENT | SWAPPED,
            return_mask: WRITTEN,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::map_runs;
    use crate::map::tests::{memfd, PrivateFile};
    use crate::protocol::Run;

    const DEVICE: &str = "/dev/userfaultfd";

    /// None where the kernel or the user cannot: the tests of what comes in its place run everywhere.
    fn tracker() -> Option<Tracker> {
        let device = File::options().read(true).write(true).open(DEVICE).ok()?;
        Tracker::new(&device).ok()
    }

    fn pagemap() -> File {
        File::open("/proc/self/pagemap").expect("pagemap")
    }

    /// A dump: the pages it would copy, and the mark it differs from.
    fn take(tracker: &mut Tracker, block: &PrivateFile, since: u64) -> (Vec<u32>, u64) {
        let mut seen = Vec::new();
        let base = tracker.take(&pagemap(), &block.ram(), since, |first, pages| seen.extend(first..first + pages));
        (seen, base.expect("a scan"))
    }

    fn write_all(block: &PrivateFile, pages: &[u8]) {
        for page in pages {
            block.write(*page);
        }
    }

    #[test]
    fn only_what_was_written_since_the_mark_is_taken() {
        let (mut tracker, block) = match tracker() {
            Some(tracker) => (tracker, PrivateFile::new(64)),
            None => return,
        };
        write_all(&block, &[1, 2, 3, 40, 63]);
        assert_eq!(take(&mut tracker, &block, 0), (vec![1, 2, 3, 40, 63], 0));
        tracker.settle(7);
        write_all(&block, &[2, 20, 21]);
        block.read(40);
        assert_eq!(take(&mut tracker, &block, 7), (vec![2, 20, 21], 7));
        tracker.settle(8);
        assert_eq!(take(&mut tracker, &block, 8), (vec![], 8));
    }

    #[test]
    fn pages_that_were_only_read_are_left_out_once_armed() {
        let (mut tracker, block) = match tracker() {
            Some(tracker) => (tracker, PrivateFile::new(64)),
            None => return,
        };
        let arm = |tracker: &mut Tracker, since| tracker.arm(&pagemap(), &block.ram(), since).expect("armed");
        for page in 0..32 {
            block.read(page);
        }
        write_all(&block, &[1, 2, 40]);
        assert_eq!(arm(&mut tracker, 0), 3);
        // Written after it was read and protected; read and written only now; only read, which goes with the rest.
        write_all(&block, &[20, 50]);
        block.read(60);
        assert_eq!(take(&mut tracker, &block, 0), (vec![1, 2, 20, 40, 50, 60], 0));
        tracker.settle(7);
        write_all(&block, &[20, 30]);
        assert_eq!(arm(&mut tracker, 7), 2);
        assert_eq!(take(&mut tracker, &block, 7), (vec![20, 30], 7));
        // Its layer was lost: every private page, and now none of a file.
        block.read(61);
        assert_eq!(arm(&mut tracker, 7), 6);
        assert_eq!(take(&mut tracker, &block, 7), (vec![1, 2, 20, 30, 40, 50], 0));
    }

    #[test]
    fn arming_again_protects_what_was_read_since_however_scattered() {
        let (mut tracker, block) = match tracker() {
            Some(tracker) => (tracker, PrivateFile::new(40_000)),
            None => return,
        };
        let arm = |tracker: &mut Tracker| tracker.arm(&pagemap(), &block.ram(), 0).expect("armed");
        block.touch(7);
        assert_eq!(arm(&mut tracker), 1);
        for page in (0..40_000).step_by(200) {
            block.look(page + 13);
        }
        block.touch(213);
        block.touch(39_999);
        assert_eq!(arm(&mut tracker), 3);
        assert_eq!(take(&mut tracker, &block, 0), (vec![7, 213, 39_999], 0));
    }

    #[test]
    fn counting_changes_nothing() {
        let (mut tracker, block) = match tracker() {
            Some(tracker) => (tracker, PrivateFile::new(64)),
            None => return,
        };
        write_all(&block, &[5, 6]);
        let count = |tracker: &mut Tracker, since| tracker.count(&pagemap(), &block.ram(), since).expect("a scan");
        assert_eq!(count(&mut tracker, 0), Counted { private_pages: 2, written_pages: 2 });
        take(&mut tracker, &block, 0);
        tracker.settle(7);
        write_all(&block, &[6, 9]);
        for _ in 0..2 {
            assert_eq!(count(&mut tracker, 7), Counted { private_pages: 3, written_pages: 2 });
            assert_eq!(count(&mut tracker, 8), Counted { private_pages: 3, written_pages: 3 });
        }
        assert_eq!(take(&mut tracker, &block, 7), (vec![6, 9], 7));
    }

    #[test]
    fn another_mark_or_a_layer_that_was_not_made_is_no_base_for_a_difference() {
        let (mut tracker, block) = match tracker() {
            Some(tracker) => (tracker, PrivateFile::new(64)),
            None => return,
        };
        write_all(&block, &[1, 2]);
        take(&mut tracker, &block, 0);
        tracker.settle(7);
        write_all(&block, &[3]);
        assert_eq!(take(&mut tracker, &block, 6), (vec![1, 2, 3], 0));
        tracker.settle(8);
        write_all(&block, &[2]);
        assert_eq!(take(&mut tracker, &block, 8), (vec![2], 8));
        // Its layer was never settled, so what it took is in none.
        assert_eq!(take(&mut tracker, &block, 8), (vec![1, 2, 3], 0));
    }

    #[test]
    fn memory_that_was_mapped_anew_is_watched_again_and_is_nobodys_write() {
        let (mut tracker, block) = match tracker() {
            Some(tracker) => (tracker, PrivateFile::new(64)),
            None => return,
        };
        write_all(&block, &[1, 30, 31]);
        take(&mut tracker, &block, 0);
        tracker.settle(7);
        let layer = memfd();
        layer.set_len(8192).expect("room");
        let runs = [Run { page: 30, pages: 2, offset: 0 }];
        map_runs(&block.ram(), &runs, 0, &layer, 8192).expect("mapped");
        tracker.remapped();
        assert_eq!(take(&mut tracker, &block, 7), (vec![1], 0));
        tracker.settle(8);
        write_all(&block, &[31]);
        assert_eq!(take(&mut tracker, &block, 8), (vec![31], 8));
    }

    #[test]
    fn a_scan_that_would_pass_over_unwatched_memory_fails() {
        let (mut tracker, block) = match tracker() {
            Some(tracker) => (tracker, PrivateFile::new(64)),
            None => return,
        };
        take(&mut tracker, &block, 0);
        let layer = memfd();
        layer.set_len(4096).expect("room");
        map_runs(&block.ram(), &[Run { page: 9, pages: 1, offset: 0 }], 0, &layer, 4096).expect("mapped");
        // Without `remapped`, as a defect would be.
        let refused = tracker.take(&pagemap(), &block.ram(), 0, |_, _| {}).expect_err("unwatched");
        assert_eq!(refused.raw_os_error(), Some(libc::EPERM));
    }

    #[test]
    fn what_the_kernel_writes_for_a_system_call_counts_as_well() {
        use std::os::unix::fs::FileExt;
        let (mut tracker, block) = match tracker() {
            Some(tracker) => (tracker, PrivateFile::new(64)),
            None => return,
        };
        write_all(&block, &[10, 11]);
        take(&mut tracker, &block, 0);
        tracker.settle(7);
        let source = memfd();
        source.write_all_at(&[9; 4096], 0).expect("a page");
        let run = Run { page: 10, pages: 1, offset: 0 };
        // Copied in, not mapped: the kernel writes the page on our behalf.
        map_runs(&block.ram(), &[run], 2, &source, 4096).expect("copied");
        assert_eq!(block.read(10), 9);
        assert_eq!(take(&mut tracker, &block, 7), (vec![10], 7));
    }

    #[test]
    fn more_stretches_than_one_call_reports_are_all_found() {
        let (mut tracker, block) = match tracker() {
            Some(tracker) => (tracker, PrivateFile::new(250)),
            None => return,
        };
        tracker.regions.truncate(3);
        let odd: Vec<u8> = (0..125).map(|i| i * 2 + 1).collect();
        write_all(&block, &odd);
        let wanted: Vec<u32> = odd.iter().map(|page| u32::from(*page)).collect();
        assert_eq!(take(&mut tracker, &block, 0).0, wanted);
        tracker.settle(7);
        write_all(&block, &odd);
        assert_eq!(take(&mut tracker, &block, 7).0, wanted);
    }

    #[test]
    fn none_is_found_twice() {
        let (mut tracker, block) = match tracker() {
            Some(tracker) => (tracker, PrivateFile::new(4096)),
            None => return,
        };
        for page in (0..4096).step_by(2) {
            block.touch(page);
        }
        let wanted: Vec<u32> = (0..4096).step_by(2).collect();
        for regions in [REGIONS, 2048, 1000] {
            tracker.regions.resize(regions, Region::default());
            assert_eq!(take(&mut tracker, &block, 0).0, wanted, "{regions} at once");
        }
    }

    #[test]
    fn what_is_not_the_device_is_refused() {
        assert_eq!(Tracker::new(&memfd()).expect_err("no device").raw_os_error(), Some(libc::ENOTTY));
    }
}
