//! A layer while it is being made: a memfd whose pages are there before they are needed.
//!
//! Form of a layer: packed pages from offset 0, then, page aligned, the run table. What costs in a stopped parent is
//! the first touch of memory, so the agent has a layer prepared ahead of time. It is this process that touches it:
//! memory of a memfd is charged to the control group of whoever touches it first, and layers are the tree's memory.

use crate::map::{GuestRam, RamBytes};
use crate::protocol::{Run, PAGE_BYTES};
use crate::syscall;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::os::unix::io::AsRawFd;
use std::ptr::NonNull;

/// The next layer, not yet sealed. Dropping it unmaps and closes it.
#[derive(Debug)]
pub struct Layer {
    view: Option<View>,
    file: File,
}

/// What of the layer is mapped and in memory. A writable view, so it has to go before the layer can be sealed.
#[derive(Debug)]
struct View {
    start: NonNull<u8>,
    len: usize,
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: The range is exactly one mapping that `View::new` made, and its pointer leaves `View` only inside
        // `Layer::copy_in`, which has returned.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

impl View {
    fn new(file: &File, len: usize) -> io::Result<Self> {
        // SAFETY: A new mapping at an address of the kernel's choice touches nothing that exists.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(at.cast()).ok_or(io::ErrorKind::Other)?;
        Ok(Self { start, len })
    }

    /// Write to every page, so that it is in memory and in this process's page tables.
    fn touch(&self) {
        for at in (0..self.len).step_by(4096) {
            // SAFETY: `at` is below the mapping's length. The file is as long as the mapping (`Layer::prepare` made it
            // so and allocated it; the agent truncates no layer that it has handed over), so this cannot fault.
            unsafe { self.start.as_ptr().add(at).write_volatile(0) };
        }
    }
}

/// Bytes to be put into a layer: guest RAM or our own.
struct Source {
    start: *const u8,
    len: usize,
}

impl Layer {
    /// Take `file`, an empty memfd, and have its first `bytes` (whole pages) really there. Memory that cannot be had
    /// is an error here rather than a fatal signal at the first write.
    pub fn prepare(file: File, bytes: u64) -> io::Result<Self> {
        file.set_len(bytes)?;
        if bytes == 0 {
            return Ok(Self { view: None, file });
        }
        allocate(&file, 0, bytes)?;
        let len = usize::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
        let view = View::new(&file, len)?;
        view.touch();
        Ok(Self { view: Some(view), file })
    }

    /// Copy packed `runs` of `ram` to their offsets, then their table; returns where the table begins. Records pass
    /// through `buffer`. What goes beyond the prepared bytes makes the layer grow, only slower.
    pub fn fill(&self, ram: &GuestRam, runs: &[Run], buffer: &mut [u8]) -> io::Result<u64> {
        let mut end = 0;
        for run in runs {
            let RamBytes { start, len } = ram.of_run(run).ok_or(io::ErrorKind::InvalidInput)?;
            let start = start.as_ptr();
            self.put(run.offset, &Source { start, len })?;
            end = run.offset + run.bytes();
        }
        let table_offset = end;
        for chunk in runs.chunks((buffer.len() / Run::BYTES).max(1)) {
            let mut len = 0;
            for (record, run) in buffer.chunks_exact_mut(Run::BYTES).zip(chunk) {
                record.copy_from_slice(&run.encode());
                len += record.len();
            }
            let records = buffer.get(..len).unwrap_or(&[]);
            let start = records.as_ptr();
            self.put(end, &Source { start, len })?;
            end += records.len() as u64;
        }
        Ok(table_offset)
    }

    /// Give up the view and cut the layer to what it holds. From here on it can be sealed.
    pub fn finish(self, bytes: u64) -> io::Result<()> {
        drop(self.view);
        self.file.set_len(bytes)
    }

    fn put(&self, offset: u64, source: &Source) -> io::Result<()> {
        let done = self.copy_in(offset, source);
        let rest = Source { start: source.start.wrapping_add(done), len: source.len - done };
        self.write_out(offset + done as u64, &rest)
    }

    /// Copy what falls into the view; returns how many bytes that was.
    fn copy_in(&self, offset: u64, source: &Source) -> usize {
        let (view, at) = match (&self.view, usize::try_from(offset)) {
            (Some(view), Ok(at)) if at < view.len => (view, at),
            _ => return 0,
        };
        let len = source.len.min(view.len - at);
        // SAFETY: `at + len` is inside the view, whose file is as long as the view (see `View::touch`). The source is
        // `source.len` readable bytes: a run that `GuestRam::of_run` checked, backed by files that the agent keeps
        // sealed against truncation, or our buffer. The two are different mappings. The VM is stopped (the agent's
        // duty); a device that wrote meanwhile would tear a page, not memory safety.
        unsafe { std::ptr::copy_nonoverlapping(source.start, view.start.as_ptr().add(at), len) };
        len
    }

    /// Write what lies beyond the view.
    fn write_out(&self, offset: u64, source: &Source) -> io::Result<()> {
        let fd = self.file.as_raw_fd();
        let mut done = 0;
        while done < source.len {
            let at = i64::try_from(offset + done as u64).map_err(|_| io::ErrorKind::InvalidInput)?;
            let (from, len) = (source.start.wrapping_add(done), source.len - done);
            // SAFETY: The kernel reads at most `len` bytes, the rest of the source, which is readable as in `copy_in`;
            // a page that were not would be EFAULT, not a signal.
            let wrote = syscall::count(|| unsafe { libc::pwrite(fd, from.cast(), len, at) })?;
            if wrote == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            done += wrote;
        }
        Ok(())
    }
}

/// Take memory for these bytes of `file`, charged to this process's control group.
pub fn allocate(file: &File, offset: u64, bytes: u64) -> io::Result<()> {
    let at = i64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
    let len = i64::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: No memory of ours is involved.
    if unsafe { libc::fallocate(file.as_raw_fd(), 0, at, len) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Add the run table that `layer` holds at `table_offset` to `table`. `Ok(false)`: there is none of that length.
pub fn read_table(
    layer: &File,
    table_offset: u64,
    runs: u32,
    buffer: &mut [u8],
    mut add: impl FnMut(&[u8]) -> bool,
) -> io::Result<bool> {
    let mut left = u64::from(runs) * Run::BYTES as u64;
    let end = match table_offset.checked_add(left) {
        Some(end) if table_offset % PAGE_BYTES == 0 => end,
        _ => return Ok(false),
    };
    let metadata = layer.metadata()?;
    if !metadata.is_file() || metadata.len() < end {
        return Ok(false);
    }
    let whole = buffer.len() - buffer.len() % Run::BYTES;
    while left > 0 {
        let len = usize::try_from(left).unwrap_or(usize::MAX).min(whole);
        let records = buffer.get_mut(..len).ok_or(io::ErrorKind::InvalidInput)?;
        if records.is_empty() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        layer.read_exact_at(records, end - left)?;
        if !add(records) {
            return Ok(false);
        }
        left -= records.len() as u64;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::tests::{memfd, PrivateFile};
    use crate::scan::RunTable;

    fn sample() -> (PrivateFile, RunTable) {
        let block = PrivateFile::new(64);
        let mut runs = RunTable::with_capacity(64).expect("room");
        runs.restart(0);
        for page in [2, 3, 4, 20, 21, 40, 63] {
            block.write(page);
            runs.add(page.into(), 1);
        }
        runs.pack();
        (block, runs)
    }

    fn read_back(layer: &File, table_offset: u64, runs: u32) -> Option<Vec<Run>> {
        let mut bytes = Vec::new();
        let whole = read_table(layer, table_offset, runs, &mut [0; 40], |records| {
            bytes.extend_from_slice(records);
            true
        });
        let runs = bytes.chunks(Run::BYTES).map(|record| Run::decode(record).expect("a run"));
        whole.expect("readable").then(|| runs.collect())
    }

    #[test]
    fn a_layer_holds_the_same_whatever_part_of_it_was_prepared() {
        let (block, runs) = sample();
        for prepared in [0, 1, 2, 6, 7, 8, 64] {
            let file = memfd();
            let layer = Layer::prepare(file.try_clone().expect("a copy"), prepared * 4096).expect("prepared");
            let table_offset = layer.fill(&block.ram(), runs.runs(), &mut [0; 40]).expect("filled");
            assert_eq!(table_offset, 7 * 4096);
            let bytes = table_offset + 4 * 16;
            layer.finish(bytes).expect("finished");
            assert_eq!(file.metadata().expect("metadata").len(), bytes);
            let marks: Vec<u8> = (0..7)
                .map(|page| {
                    let mut mark = [0];
                    file.read_exact_at(&mut mark, page * 4096).expect("a page");
                    mark[0] - 1
                })
                .collect();
            assert_eq!(marks, [2, 3, 4, 20, 21, 40, 63]);
            assert_eq!(read_back(&file, table_offset, 4).as_deref(), Some(runs.runs()));
        }
    }

    #[test]
    fn a_finished_layer_can_be_sealed_and_one_still_mapped_cannot() {
        let file = memfd();
        let seal = || {
            let seals = libc::F_SEAL_WRITE | libc::F_SEAL_GROW | libc::F_SEAL_SHRINK;
            // SAFETY: No memory of ours is involved.
            unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) }
        };
        let layer = Layer::prepare(file.try_clone().expect("a copy"), 8192).expect("prepared");
        assert_eq!(seal(), -1);
        layer.finish(4096).expect("finished");
        assert_eq!(seal(), 0);
    }

    #[test]
    fn preparing_takes_memory_for_every_page() {
        use std::os::unix::fs::MetadataExt;
        let file = memfd();
        let layer = Layer::prepare(file.try_clone().expect("a copy"), 64 * 4096).expect("prepared");
        assert_eq!(file.metadata().expect("metadata").blocks() * 512, 64 * 4096);
        drop(layer);
    }

    #[test]
    fn what_is_no_memfd_is_refused() {
        let file = File::open("/proc/self/stat").expect("a file");
        assert!(Layer::prepare(file, 4096).is_err());
    }

    #[test]
    fn a_table_that_is_not_there_is_not_read() {
        let file = memfd();
        file.set_len(8192 + 16).expect("room");
        assert_eq!(read_back(&file, 8192, 1), Some(vec![Run::default()]));
        assert_eq!(read_back(&file, 8192, 0), Some(vec![]));
        for (offset, runs) in [(8192, 2), (8192, u32::MAX), (8193, 1), (12_288, 1), (u64::MAX - 4095, 256)] {
            assert_eq!(read_back(&file, offset, runs), None, "{offset} {runs}");
        }
        let folder = File::open("/proc/self").expect("a folder");
        assert_eq!(read_back(&folder, 0, 0), None);
    }
}
