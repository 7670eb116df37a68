//! Guest RAM: where it lies in this process, and backing it by layers.

use crate::protocol::{Refusal, Run, PAGE_BYTES};
use crate::syscall;
use std::fs::File;
use std::io;
use std::os::unix::io::AsRawFd;
use std::ptr::NonNull;

/// Guest RAM, one block of addresses that QEMU keeps mapped for the life of the process.
#[derive(Clone, Copy, Debug)]
pub struct GuestRam {
    start: NonNull<u8>,
    pages: u32,
    private: bool,
}

/// Bytes that stay readable while guest RAM is there. No slice: vCPUs and devices write to them.
#[derive(Clone, Copy, Debug)]
pub struct RamBytes {
    pub(crate) start: NonNull<u8>,
    pub(crate) len: usize,
}

impl GuestRam {
    /// Find the one file mapping of exactly `ram_bytes` in `maps`, the text of this process's `/proc/self/maps`.
    /// To be asked before anything is mapped over it, which splits it.
    pub fn find(maps: &[u8], ram_bytes: u64) -> Result<Self, Refusal> {
        let mut found = 0;
        let mut ram = None;
        for line in maps.split(|byte| *byte == b'\n') {
            if let Some(candidate) = Self::of_line(line, ram_bytes) {
                found += 1;
                ram = Some(candidate);
            }
        }
        match ram {
            Some(ram) if found == 1 => Ok(ram),
            _ => Err(Refusal::RamNotFound { found }),
        }
    }

    /// A line reads `start-end perms offset dev inode path`, numbers in hex but for the inode, 0 without a file.
    fn of_line(line: &[u8], ram_bytes: u64) -> Option<Self> {
        let mut words = line.split(|byte| *byte == b' ').map(std::str::from_utf8);
        let (start, end) = words.next()?.ok()?.split_once('-')?;
        let perms = words.next()?.ok()?;
        let inode = words.nth(2)?.ok()?;
        let start = usize::from_str_radix(start, 16).ok()?;
        let end = usize::from_str_radix(end, 16).ok()?;
        let bytes = u64::try_from(end.checked_sub(start)?).ok()?;
        if bytes != ram_bytes || bytes % PAGE_BYTES != 0 || !perms.starts_with("rw") || inode == "0" {
            return None;
        }
        Some(Self {
            start: NonNull::new(start as *mut u8)?,
            pages: u32::try_from(bytes / PAGE_BYTES).ok()?,
            private: perms.ends_with('p'),
        })
    }

    pub fn address(&self) -> u64 {
        self.start.as_ptr() as u64
    }

    pub fn pages(&self) -> u32 {
        self.pages
    }

    pub fn bytes(&self) -> u64 {
        u64::from(self.pages) * PAGE_BYTES
    }

    /// Whether writes to RAM stay in this process, without which layers would be wrong.
    pub fn is_private(&self) -> bool {
        self.private
    }

    fn holds(&self, run: &Run) -> bool {
        run.pages > 0 && run.end() <= u64::from(self.pages)
    }

    /// The bytes of `run`, or `None` if it does not lie in RAM.
    pub fn of_run(&self, run: &Run) -> Option<RamBytes> {
        if !self.holds(run) {
            return None;
        }
        let skip = usize::try_from(u64::from(run.page) * PAGE_BYTES).ok()?;
        let len = usize::try_from(run.bytes()).ok()?;
        // SAFETY: `holds` proved that the run ends inside RAM, which is one mapping of the size found in `find`, so
        // the sum stays inside it; QEMU keeps the block mapped, and `map_runs` only ever replaces it in place.
        let start = unsafe { NonNull::new_unchecked(self.start.as_ptr().add(skip)) };
        Some(RamBytes { start, len })
    }

    #[cfg(test)]
    pub(crate) fn of_test(start: u64, pages: u32) -> Self {
        let start = NonNull::new(start as *mut u8).expect("an address");
        Self { start, pages, private: true }
    }
}

/// The first run, by index, that is empty, leaves RAM, leaves the layer's `layer_bytes`, is off a page border, or
/// begins before the one before it ended.
pub fn first_bad(runs: &[Run], ram: &GuestRam, layer_bytes: u64) -> Option<u64> {
    let mut floor = 0;
    for (index, run) in (0..).zip(runs) {
        let inside = run.offset.checked_add(run.bytes());
        let good = ram.holds(run)
            && u64::from(run.page) >= floor
            && run.offset % PAGE_BYTES == 0
            && inside.map_or(false, |end| end <= layer_bytes);
        if !good {
            return Some(index);
        }
        floor = run.end();
    }
    None
}

/// Back guest RAM with `runs` of `layer`, copy-on-write; those of fewer than `copy_below` pages are copied instead,
/// which costs memory and no mapping. Returns how many were mapped. Checks every run before it touches RAM; after
/// `HalfMapped` the VM must be killed. The caller's duty: vCPUs stand still and `layer_bytes` of `layer` exist.
pub fn map_runs(ram: &GuestRam, runs: &[Run], copy_below: u32, layer: &File, layer_bytes: u64) -> Result<u64, Refusal> {
    if let Some(index) = first_bad(runs, ram, layer_bytes) {
        return Err(Refusal::BadRun { index });
    }
    let mut mapped = 0;
    for (index, run) in (0..).zip(runs) {
        let done = if run.pages < copy_below {
            copy_run(ram, run, layer)
        } else {
            mapped += 1;
            map_run(ram, run, layer)
        };
        if let Err(error) = done {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            return Err(Refusal::HalfMapped { errno, index });
        }
    }
    Ok(mapped)
}

/// Make the run's pages this VM's own, with what the layer has of them.
fn copy_run(ram: &GuestRam, run: &Run, layer: &File) -> io::Result<()> {
    let RamBytes { start, len } = ram.of_run(run).ok_or(io::ErrorKind::InvalidInput)?;
    let mut done = 0;
    while done < len {
        let at = i64::try_from(run.offset + done as u64).map_err(|_| io::ErrorKind::InvalidInput)?;
        let (into, left) = (start.as_ptr().wrapping_add(done), len - done);
        // SAFETY: The kernel writes at most `left` bytes, the rest of a range that `of_run` proved inside the RAM block,
        // which is writable. vCPUs stand still (the agent's duty) and no Rust reference points into guest RAM.
        let got = syscall::count(|| unsafe { libc::pread(layer.as_raw_fd(), into.cast(), left, at) })?;
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        done += got;
    }
    Ok(())
}

fn map_run(ram: &GuestRam, run: &Run, layer: &File) -> io::Result<()> {
    let bytes = ram.of_run(run).ok_or(io::ErrorKind::InvalidInput)?;
    let offset = i64::try_from(run.offset).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: `of_run` proved the range inside the RAM block and it is page aligned like every run, so MAP_FIXED
    // replaces guest pages only, and with a mapping of the same protection: pointers that QEMU holds into RAM stay
    // good. vCPUs and devices stand still (the agent's duty), and no Rust reference points into guest RAM
    // (`RamBytes` holds none). If mmap fails the old mapping may be gone: the callers report it and the VM dies.
    let at = unsafe {
        libc::mmap(
            bytes.start.as_ptr().cast(),
            bytes.len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE,
            layer.as_raw_fd(),
            offset,
        )
    };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::FileExt;
    use std::os::unix::io::FromRawFd;

    pub fn memfd() -> File {
        // SAFETY: The name is a C string; the result is checked and owned by nobody else.
        unsafe {
            let fd = libc::memfd_create(b"test\0".as_ptr().cast(), libc::MFD_ALLOW_SEALING);
            assert!(fd >= 0);
            File::from_raw_fd(fd)
        }
    }

    /// Pages of a memfd, mapped privately: guest RAM in small.
    pub struct PrivateFile {
        start: *mut u8,
        pages: u32,
    }

    impl PrivateFile {
        pub fn new(pages: u32) -> Self {
            let file = memfd();
            let len = pages as usize * 4096;
            file.set_len(len as u64).expect("room");
            let (rw, private) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE);
            let nowhere = std::ptr::null_mut();
            // SAFETY: A new mapping at an address of the kernel's choice touches nothing that exists.
            let start = unsafe { libc::mmap(nowhere, len, rw, private, file.as_raw_fd(), 0) };
            assert_ne!(start, libc::MAP_FAILED);
            Self { start: start.cast(), pages }
        }

        pub fn address(&self) -> u64 {
            self.start as u64
        }

        pub fn ram(&self) -> GuestRam {
            GuestRam::of_test(self.address(), self.pages)
        }

        fn at(&self, page: u32) -> *mut u8 {
            assert!(page < self.pages);
            self.start.wrapping_add(page as usize * 4096)
        }

        /// Write to a page; what, nobody asks.
        pub fn touch(&self, page: u32) {
            // SAFETY: `at` checked the page; the mapping lives as long as `self`.
            unsafe { self.at(page).write_volatile(1) }
        }

        /// Read a page.
        pub fn look(&self, page: u32) -> u8 {
            // SAFETY: As in `touch`.
            unsafe { self.at(page).read_volatile() }
        }

        /// Mark a page with its number and one, so that no mark is an untouched page's.
        pub fn write(&self, page: u8) {
            // SAFETY: As in `touch`.
            unsafe { self.at(page.into()).write_volatile(page + 1) }
        }

        pub fn read(&self, page: u8) -> u8 {
            self.look(page.into())
        }
    }

    impl Drop for PrivateFile {
        fn drop(&mut self) {
            // SAFETY: The mapping is ours and nothing uses it any more.
            unsafe { libc::munmap(self.start.cast(), self.pages as usize * 4096) };
        }
    }

    fn run(page: u32, pages: u32, offset: u64) -> Run {
        Run { page, pages, offset }
    }

    const LINES: &str = "\
55d0-55e0 r--p 00000000 fe:00 1234 /usr/bin/qemu
7f0000000000-7f0000400000 rw-p 00000000 00:00 0 \n\
7f0010000000-7f0010400000 rw-p 00000000 00:01 99 /memfd:memory-backend-memfd (deleted)
7f0020000000-7f0020800000 rw-s 00000000 00:01 98 /memfd:other (deleted)
7f0030000000-7f0030800000 r--p 00000000 00:01 98 /usr/share/a\tfile with spaces
";

    #[test]
    fn ram_is_the_one_writable_file_mapping_of_its_size() {
        let ram = GuestRam::find(LINES.as_bytes(), 4 << 20).expect("RAM");
        assert_eq!((ram.address(), ram.pages()), (0x7f00_1000_0000, 1024));
        assert!(ram.is_private());
        let shared = GuestRam::find(LINES.as_bytes(), 8 << 20).expect("RAM");
        assert!(!shared.is_private());
    }

    #[test]
    fn ram_that_is_missing_or_there_twice_is_not_guessed() {
        let twice = [LINES, LINES].concat();
        for (maps, bytes, found) in [(LINES, 1 << 20, 0), (&twice, 4 << 20, 2), ("", 1, 0)] {
            let refusal = GuestRam::find(maps.as_bytes(), bytes).expect_err("no RAM");
            assert_eq!(refusal, Refusal::RamNotFound { found });
        }
        assert!(GuestRam::find(b"\xff-\xff \xff\n-\n \n", 0).is_err());
    }

    #[test]
    fn bad_runs_are_found_wherever_they_stand() {
        let block = PrivateFile::new(16);
        let (ram, layer) = (block.ram(), 8 * 4096);
        let bad = [
            run(0, 0, 0),
            run(16, 1, 0),
            run(15, 2, 0),
            run(u32::MAX, u32::MAX, 0),
            run(1, 1, 1),
            run(1, 1, layer),
            run(1, 8, 4096),
            run(1, 1, u64::MAX - 4095),
            run(1, 1, 1 << 63),
        ];
        for culprit in bad {
            assert_eq!(first_bad(&[culprit], &ram, layer), Some(0), "{culprit:?}");
            let pair = [run(0, 1, 0), culprit];
            assert_eq!(first_bad(&pair, &ram, layer), Some(1), "{culprit:?}");
        }
        assert_eq!(first_bad(&[run(4, 2, 0), run(5, 1, 0)], &ram, layer), Some(1));
        let good = [run(0, 8, 0), run(8, 7, 4096), run(15, 1, 0)];
        assert_eq!(first_bad(&good, &ram, layer), None);
        assert_eq!(first_bad(&[], &ram, 0), None);
    }

    #[test]
    fn nothing_is_mapped_when_any_run_is_bad() {
        let block = PrivateFile::new(4);
        block.write(1);
        let mut layer = memfd();
        layer.write_all(&[7; 4096]).expect("a page");
        let runs = [run(1, 1, 0), run(2, 1, 4096)];
        let refusal = map_runs(&block.ram(), &runs, 0, &layer, 4096).expect_err("a bad run");
        assert_eq!(refusal, Refusal::BadRun { index: 1 });
        assert_eq!(block.read(1), 2);
    }

    #[test]
    fn mapped_runs_show_the_layer_and_keep_writes_to_themselves() {
        let (first, second) = (PrivateFile::new(4), PrivateFile::new(4));
        first.write(3);
        let mut layer = memfd();
        layer.write_all(&[7; 8192]).expect("two pages");
        for block in [&first, &second] {
            map_runs(&block.ram(), &[run(1, 2, 0)], 0, &layer, 8192).expect("mapped");
        }
        first.write(2);
        assert_eq!([first.read(1), first.read(2), first.read(3)], [7, 3, 4]);
        assert_eq!([second.read(1), second.read(2), second.read(3)], [7, 7, 0]);
    }

    #[test]
    fn short_runs_are_copied_and_the_others_mapped() {
        let (copied, mapped) = (PrivateFile::new(8), PrivateFile::new(8));
        let mut layer = memfd();
        layer.write_all(&[7; 3 * 4096]).expect("three pages");
        let runs = [run(1, 1, 0), run(4, 2, 4096)];
        assert_eq!(map_runs(&copied.ram(), &runs, 2, &layer, 3 * 4096), Ok(1));
        assert_eq!(map_runs(&mapped.ram(), &runs, 0, &layer, 3 * 4096), Ok(2));
        // What is mapped shows what becomes of the file, which only a test does to a layer; a copy is a copy.
        layer.write_all_at(&[9; 3 * 4096], 0).expect("written over");
        assert_eq!([copied.read(1), copied.read(4), copied.read(5), copied.read(2)], [7, 9, 9, 0]);
        assert_eq!([mapped.read(1), mapped.read(4), mapped.read(5), mapped.read(2)], [9, 9, 9, 0]);
    }

    #[test]
    fn a_run_that_the_layer_does_not_have_cannot_be_copied() {
        let block = PrivateFile::new(4);
        // The caller lies about the size.
        let refusal = map_runs(&block.ram(), &[run(0, 1, 0)], 2, &memfd(), 4096).expect_err("no page");
        let (errno, index) = (libc::EIO, 0);
        assert_eq!(refusal, Refusal::HalfMapped { errno, index });
    }

    #[test]
    fn a_failed_map_says_that_the_vm_must_be_killed() {
        let block = PrivateFile::new(4);
        block.write(0);
        // Past the longest file there can be: checked by nobody before mmap, since the caller lies about the size.
        let runs = [run(0, 1, 0), run(1, 1, (1 << 63) - 4096)];
        let layer = memfd();
        layer.set_len(4096).expect("a page");
        let refusal = map_runs(&block.ram(), &runs, 0, &layer, u64::MAX).expect_err("no map");
        let (errno, index) = (libc::EOVERFLOW, 1);
        assert_eq!(refusal, Refusal::HalfMapped { errno, index });
        assert_eq!(block.read(0), 0);
    }
}
