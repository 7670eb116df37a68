//! Which guest pages are private to this VM, and how they gather into runs.
//!
//! Guest RAM is a private file mapping, so exactly the pages that this VM has written are anonymous memory.
//! `/proc/self/pagemap` tells them apart on every kernel since 4.2, also for an unprivileged user, who only sees
//! no frame numbers. It knows no time, though: which of them are new is asked of a `Tracker`, where the kernel has one.

use crate::protocol::{Run, PAGE_BYTES};
use std::collections::TryReserveError;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// The most runs that one layer may have. A child pays up to two mappings a run and the kernel grants 65,530 to a
/// process, so a layer near this bound is already one that the agent refuses to stack upon.
pub const MAX_RUNS: usize = 32_768;
/// Runs whose room is touched ahead of time: what a dump settles for unless gaps would double the copy.
const USUAL_RUNS: usize = 2_048;
const PAGEMAP_ENTRY_BYTES: usize = 8;

/// Whether a pagemap entry shows a page of this process alone: there, in memory or swapped out (bits 63, 62), and
/// neither of a file nor shared (bit 61).
fn is_private(entry: u64) -> bool {
    entry >> 62 != 0 && entry >> 61 & 1 == 0
}

/// Calls `found` with the index of every private page among `pages` pages from address `start`, ascending.
/// Reads through `buffer`, whose length bounds one read.
pub fn private_pages(
    pagemap: &File,
    start: u64,
    pages: u32,
    buffer: &mut [u8],
    mut found: impl FnMut(u32),
) -> io::Result<()> {
    let first = start / PAGE_BYTES;
    let mut next = 0;
    while next < pages {
        let room = buffer.len() / PAGEMAP_ENTRY_BYTES;
        let count = u32::try_from(room).unwrap_or(u32::MAX).clamp(1, pages - next);
        let bytes = count as usize * PAGEMAP_ENTRY_BYTES;
        let entries = buffer.get_mut(..bytes).ok_or(io::ErrorKind::InvalidInput)?;
        let offset = (first + u64::from(next)) * PAGEMAP_ENTRY_BYTES as u64;
        pagemap.read_exact_at(entries, offset)?;
        for (page, entry) in (next..).zip(entries.chunks_exact(PAGEMAP_ENTRY_BYTES)) {
            if is_private(entry.try_into().map_or(0, u64::from_ne_bytes)) {
                found(page);
            }
        }
        next += count;
    }
    Ok(())
}

/// Gathers ascending pages into runs over small gaps, in room taken once: the guest decides how scattered its
/// writes are, so neither memory nor the number of mappings may follow it.
#[derive(Debug)]
pub struct RunTable {
    runs: Vec<Run>,
    capacity: usize,
    gap_pages: u32,
    dirty_pages: u64,
}

impl RunTable {
    /// With room for `capacity` runs, at least one.
    pub fn with_capacity(capacity: usize) -> Result<Self, TryReserveError> {
        let capacity = capacity.max(1);
        let mut runs = Vec::new();
        runs.try_reserve_exact(capacity)?;
        // Really written: a first touch of fresh memory would otherwise happen while a parent is stopped.
        runs.resize(capacity.min(USUAL_RUNS), Run::default());
        runs.clear();
        Ok(Self { runs, capacity, gap_pages: 0, dirty_pages: 0 })
    }

    /// Forget all runs; pages added from now on join a run up to `gap_pages` clean pages before them.
    pub fn restart(&mut self, gap_pages: u32) {
        self.runs.clear();
        self.gap_pages = gap_pages;
        self.dirty_pages = 0;
    }

    /// Add `pages` pages from `page` on, which is above all pages so far. When the room is full, gaps widen until it
    /// is not.
    pub fn add(&mut self, page: u32, pages: u32) {
        self.dirty_pages += u64::from(pages);
        while !self.joins(page, pages) {
            if self.runs.len() < self.capacity {
                let offset = 0;
                self.runs.push(Run { page, pages, offset });
                return;
            }
            self.widen();
        }
    }

    /// Lengthen the last run to the end of these pages if it is near enough.
    fn joins(&mut self, page: u32, pages: u32) -> bool {
        let reach = u64::from(self.gap_pages);
        match self.runs.last_mut() {
            Some(last) if u64::from(page) <= last.end() + reach => {
                last.pages = page - last.page + pages;
                true
            }
            _ => false,
        }
    }

    /// Widen gaps until there are at most `target_runs` runs, or until that would copy more than twice the dirty
    /// pages: from there on a mapping costs a child less than the copy costs the stopped parent.
    pub fn settle(&mut self, target_runs: u32) {
        let bound = self.dirty_pages * 2;
        let target_runs = target_runs.max(1) as usize;
        while self.runs.len() > target_runs && self.pages_at(self.wider()) <= bound {
            self.widen();
        }
    }

    /// Give every run its place in a packed layer; returns the end of the last, in bytes.
    pub fn pack(&mut self) -> u64 {
        let mut offset = 0;
        for run in &mut self.runs {
            run.offset = offset;
            offset += run.bytes();
        }
        offset
    }

    /// Replace the runs by those of a table of `len` bytes or fewer; `false` if they do not fit.
    pub fn refill(&mut self, table: &[u8]) -> bool {
        for record in table.chunks(Run::BYTES) {
            match Run::decode(record) {
                Some(run) if self.runs.len() < self.capacity => self.runs.push(run),
                _ => return false,
            }
        }
        true
    }

    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    pub fn gap_pages(&self) -> u32 {
        self.gap_pages
    }

    pub fn dirty_pages(&self) -> u64 {
        self.dirty_pages
    }

    /// Pages in all runs, clean ones in gaps included.
    pub fn pages(&self) -> u64 {
        self.runs.iter().map(|run| u64::from(run.pages)).sum()
    }

    fn wider(&self) -> u32 {
        self.gap_pages.saturating_mul(2).max(1)
    }

    /// Pages that the runs would have at a gap of `gap_pages`.
    fn pages_at(&self, gap_pages: u32) -> u64 {
        let pairs = self.runs.iter().zip(self.runs.iter().skip(1));
        let gaps = pairs.map(|(run, next)| u64::from(next.page) - run.end());
        let filled: u64 = gaps.filter(|gap| *gap <= u64::from(gap_pages)).sum();
        self.pages() + filled
    }

    fn widen(&mut self) {
        let gap_pages = self.wider();
        self.gap_pages = gap_pages;
        // `dedup_by` hands over a run and the kept one before it, and drops the run where this says true.
        self.runs.dedup_by(|run, kept| {
            let close = u64::from(run.page) <= kept.end() + u64::from(gap_pages);
            if close {
                kept.pages = run.page - kept.page + run.pages;
            }
            close
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gathered(pages: impl IntoIterator<Item = u32>, capacity: usize, gap: u32) -> RunTable {
        let mut table = RunTable::with_capacity(capacity).expect("room");
        table.restart(gap);
        pages.into_iter().for_each(|page| table.add(page, 1));
        table
    }

    fn extents(table: &RunTable) -> Vec<(u32, u32)> {
        table.runs().iter().map(|run| (run.page, run.pages)).collect()
    }

    #[test]
    fn only_present_or_swapped_pages_of_no_file_are_private() {
        let (present, swapped, file) = (1 << 63, 1 << 62, 1 << 61);
        assert!(is_private(present) && is_private(swapped));
        assert!(!is_private(0) && !is_private(present | file) && !is_private(swapped | file));
        assert!(!is_private(file) && !is_private((1 << 61) - 1));
    }

    #[test]
    fn gaps_up_to_the_given_size_are_bridged() {
        let pages = [0, 1, 2, 5, 10, 11];
        assert_eq!(extents(&gathered(pages, 8, 0)), [(0, 3), (5, 1), (10, 2)]);
        assert_eq!(extents(&gathered(pages, 8, 2)), [(0, 6), (10, 2)]);
        assert_eq!(extents(&gathered(pages, 8, 4)), [(0, 12)]);
    }

    #[test]
    fn stretches_are_as_good_as_their_pages() {
        let stretches = [(0, 3), (3, 1), (9, 4), (14, 2), (40, 1)];
        for gap in [0, 1, 4, 30] {
            let mut table = RunTable::with_capacity(8).expect("room");
            table.restart(gap);
            for (page, pages) in stretches {
                table.add(page, pages);
            }
            let one_by_one = gathered(stretches.iter().flat_map(|(page, pages)| *page..page + pages), 8, gap);
            assert_eq!(table.runs(), one_by_one.runs());
            assert_eq!(table.dirty_pages(), one_by_one.dirty_pages());
        }
    }

    #[test]
    fn the_last_page_of_the_largest_ram_does_not_wrap() {
        let table = gathered([0, u32::MAX - 1], 8, u32::MAX);
        assert_eq!(extents(&table), [(0, u32::MAX)]);
    }

    #[test]
    fn scattered_pages_stay_within_the_room_and_none_is_lost() {
        for (count, stride, capacity) in [(50_000, 2, 100), (9_999, 37, 1_000), (3_000, 9, 1)] {
            let pages = || (0..count).map(|i| i * stride);
            let table = gathered(pages(), capacity, 0);
            assert!(table.runs().len() <= capacity);
            assert_eq!(table.dirty_pages(), u64::from(count));
            let holds = |page| move |run: &Run| run.page <= page && u64::from(page) < run.end();
            assert!(pages().all(|page| table.runs().iter().any(holds(page))));
        }
    }

    /// Numbers without a pattern, the same in every run.
    fn noise(seed: u64) -> impl Iterator<Item = u32> {
        let mut state = seed;
        std::iter::from_fn(move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            u32::try_from(state >> 33).ok()
        })
    }

    #[test]
    fn whatever_is_written_runs_are_apart_in_order_and_hold_all_of_it() {
        for seed in 0..200 {
            let mut dice = noise(seed);
            let mut roll = |sides: u32| dice.next().expect("endless") % sides;
            let (gap, capacity, spread) = (roll(8), 1 + roll(300), 1 + roll(50));
            let mut pages = vec![roll(spread)];
            for at in 0..usize::try_from(roll(2_000)).expect("small") {
                pages.push(pages[at] + 1 + roll(spread));
            }
            let mut table = gathered(pages.iter().copied(), capacity as usize, gap);
            table.settle(roll(100));
            let end = table.pack();
            assert!(table.gap_pages() >= gap && table.runs().len() <= capacity as usize);
            assert_eq!((table.pages() * PAGE_BYTES, table.dirty_pages()), (end, pages.len() as u64));
            for (run, next) in table.runs().iter().zip(table.runs().iter().skip(1)) {
                assert!(run.end() + u64::from(table.gap_pages()) < u64::from(next.page));
                assert_eq!(run.offset + run.bytes(), next.offset);
            }
            let held = |page: u32| table.runs().iter().any(|run| run.page <= page && u64::from(page) < run.end());
            assert!(pages.iter().all(|page| held(*page)), "seed {seed}");
            let edges = table.runs().iter().flat_map(|run| [u64::from(run.page), run.end() - 1]);
            assert!(edges.map(|edge| u32::try_from(edge).expect("a page")).all(|edge| pages.contains(&edge)));
        }
    }

    #[test]
    fn settling_widens_gaps_until_the_runs_are_few() {
        let mut table = gathered((0..4_000).map(|i| i * 2), 8_192, 0);
        assert_eq!(table.runs().len(), 4_000);
        table.settle(2_000);
        assert_eq!(extents(&table), [(0, 7_999)]);
        assert_eq!(table.gap_pages(), 1);
        table.settle(0);
        assert_eq!(table.runs().len(), 1);
    }

    #[test]
    fn settling_stops_before_the_copy_more_than_doubles() {
        let mut table = gathered((0..4_000).map(|i| i * 40), 8_192, 4);
        table.settle(2_000);
        assert_eq!((table.runs().len(), table.pages()), (4_000, 4_000));
        // A gap of 64 would have bridged them all, and copied forty times as much.
        assert_eq!(table.gap_pages(), 32);
    }

    #[test]
    fn packing_puts_runs_one_behind_the_other() {
        let mut table = gathered([3, 4, 90, 200, 201, 202], 8, 0);
        let end = table.pack();
        let offsets: Vec<_> = table.runs().iter().map(|run| run.offset).collect();
        assert_eq!((offsets, end), (vec![0, 2 * 4096, 3 * 4096], 6 * 4096));
    }

    #[test]
    fn a_table_of_runs_is_read_back_and_one_too_long_is_not() {
        let runs = gathered([3, 90], 2, 0);
        let bytes: Vec<u8> = runs.runs().iter().flat_map(Run::encode).collect();
        let mut table = RunTable::with_capacity(2).expect("room");
        assert!(table.refill(&bytes));
        assert_eq!(table.runs(), runs.runs());
        assert!(!table.refill(&bytes));
        table.restart(0);
        assert!(!table.refill(&bytes[..17]));
    }

    #[test]
    fn a_scan_in_small_reads_finds_what_was_written() {
        let pagemap = File::open("/proc/self/pagemap").expect("pagemap");
        // Of a file, private, and only some pages written: as guest RAM is.
        let ram = crate::map::tests::PrivateFile::new(64);
        for page in [0, 1, 17, 62, 63] {
            ram.write(page);
        }
        ram.read(30);
        for buffer_bytes in [8, 24, 4096] {
            let mut seen = Vec::new();
            let mut buffer = vec![0; buffer_bytes];
            private_pages(&pagemap, ram.address(), 64, &mut buffer, |page| {
                seen.push(page);
            })
            .expect("a scan");
            assert_eq!(seen, [0, 1, 17, 62, 63]);
        }
    }
}
