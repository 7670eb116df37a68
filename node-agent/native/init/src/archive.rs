//! Whole folders, as tar archives.

use crate::files::make_folders;
use crate::transfer::{tell, Failed, Sent, Why};
use serde::Serialize;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::io::AsRawFd;
use std::path::{Path, PathBuf};

#[derive(Debug, Serialize)]
pub struct Unpacked {
    entries: u64,
}

/// Tell that it begins, then send what is at `path`: a folder's content, or one file.
///
/// File systems that are mounted below it stay out, or the whole of `/` would be /proc too; so do pipes, sockets and
/// devices.
pub fn pack(path: &Path, output: &mut impl Write) -> io::Result<()> {
    let failed = |error: io::Error| Failed::of(&format!("cannot pack {}", path.display()), &error);
    let (root, found) = match fs::canonicalize(path).and_then(|root| fs::metadata(&root).map(|found| (root, found))) {
        Ok(found) => found,
        Err(error) => return tell::<()>(output, &Err(failed(error))).and(Err(io::ErrorKind::NotFound.into())),
    };
    tell(output, &Ok(true))?;
    let mut archive = tar::Builder::new(io::BufWriter::with_capacity(64 << 10, output));
    if found.is_dir() {
        append_folder(&mut archive, &root, found.dev())?;
    } else {
        let name = root.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        append(&mut archive, &root, Path::new(name), found.dev())?;
    }
    archive.into_inner()?.flush()
}

fn append_folder(archive: &mut tar::Builder<impl Write>, root: &Path, device: u64) -> io::Result<()> {
    let mut waiting = vec![PathBuf::new()];
    while let Some(folder) = waiting.pop() {
        let mut names: Vec<_> =
            fs::read_dir(root.join(&folder))?.filter_map(|each| each.ok().map(|each| each.file_name())).collect();
        names.sort();
        for name in names {
            let below = folder.join(name);
            if append(archive, &root.join(&below), &below, device)? {
                waiting.push(below);
            }
        }
    }
    Ok(())
}

/// Add one entry. Returns whether it is a folder to be gone through.
fn append(archive: &mut tar::Builder<impl Write>, path: &Path, name: &Path, device: u64) -> io::Result<bool> {
    let found = match fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false), // Gone meanwhile.
        Err(error) => return Err(error),
    };
    let mut header = tar::Header::new_gnu();
    header.set_metadata(&found);
    let kind = found.file_type();
    if kind.is_symlink() {
        archive.append_link(&mut header, name, fs::read_link(path)?)?;
    } else if kind.is_dir() {
        if found.dev() != device {
            return Ok(false);
        }
        archive.append_data(&mut header, name, io::empty())?;
        return Ok(true);
    } else if kind.is_file() {
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW).open(path)?;
        archive.append_data(&mut header, name, Exactly::new(file, found.len()))?;
    }
    Ok(false)
}

/// As much as the header says, whatever happens to the file meanwhile: zeros where it has become shorter.
struct Exactly {
    file: File,
    left: u64,
}

impl Exactly {
    fn new(file: File, bytes: u64) -> Self {
        Self { file, left: bytes }
    }
}

impl Read for Exactly {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let room = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        let mut count = self.file.read(&mut buffer[..room])?;
        if count == 0 {
            buffer[..room].fill(0);
            count = room;
        }
        self.left -= u64::try_from(count).unwrap_or(0);
        Ok(count)
    }
}

/// Put what is sent into a folder, which is made where there is none. Files that are there are replaced.
pub fn unpack(path: &Path, mut archive: Sent<impl Read + AsRawFd>) -> Result<Unpacked, Failed> {
    let failed = |error: io::Error| Failed::of(&format!("cannot unpack into {}", path.display()), &error);
    make_folders(path).map_err(failed)?;
    let mut reader = tar::Archive::new(&mut archive);
    reader.set_preserve_permissions(true);
    let mut entries = 0;
    for entry in reader.entries().map_err(failed)? {
        let mut entry = entry.map_err(failed)?;
        if !entry.unpack_in(path).map_err(failed)? {
            let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
            return Err(Failed::new(
                Why::Invalid,
                format!("cannot unpack {name:?}: it lies outside of {}", path.display()),
            ));
        }
        entries += 1;
    }
    archive.finish().map_err(failed)?;
    Ok(Unpacked { entries })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Folder;
    use proptest::prelude::*;
    use std::os::unix::fs::symlink;

    fn packed(path: &Path) -> Vec<u8> {
        let mut output = Vec::new();
        pack(path, &mut output).expect("packed");
        let line = output.iter().position(|byte| *byte == b'\n').expect("a line");
        output.split_off(line + 1)
    }

    fn sent(archive: &[u8], whole: bool) -> Sent<File> {
        let mut bytes = u32::try_from(archive.len()).expect("short").to_be_bytes().to_vec();
        bytes.extend(archive);
        if whole {
            bytes.extend([0; 4]);
        }
        Sent::new(File::from(crate::sys::memory_file(&bytes).expect("a file")))
    }

    #[test]
    fn a_folder_comes_out_as_it_went_in() {
        let (from, to) = (Folder::new("archive-from"), Folder::new("archive-to"));
        fs::create_dir_all(from.0.join("a/b")).expect("made");
        fs::write(from.0.join("a/b/file"), vec![7; 100_000]).expect("written");
        fs::write(from.0.join(format!("a/{}", "long".repeat(50))), "x").expect("written");
        symlink("../nowhere", from.0.join("a/link")).expect("a link");
        let archive = packed(&from.0);
        let into = to.0.join("new");
        assert_eq!(unpack(&into, sent(&archive, true)).expect("unpacked").entries, 5);
        assert_eq!(fs::read(into.join("a/b/file")).expect("read"), vec![7; 100_000]);
        assert_eq!(fs::read_link(into.join("a/link")).expect("a link"), Path::new("../nowhere"));
        assert_eq!(unpack(&into, sent(&archive, true)).expect("over what is there").entries, 5);
        assert_eq!(unpack(&into, sent(&archive, false)).expect_err("cut").why, Why::Invalid);
        assert_eq!(unpack(&into, sent(&archive[..700], true)).expect_err("cut").why, Why::Invalid);
        assert_eq!(packed(&from.0.join("a/b/file")).len() % 512, 0);
    }

    #[test]
    fn nothing_is_unpacked_outside() {
        let to = Folder::new("archive-outside");
        let mut builder = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_size(1);
        header.as_gnu_mut().expect("gnu").name[..11].copy_from_slice(b"a/../../out");
        header.set_cksum();
        builder.append(&header, &b"x"[..]).expect("appended");
        let archive = builder.into_inner().expect("an archive");
        let failed = unpack(&to.0.join("in"), sent(&archive, true)).expect_err("refused");
        assert!(failed.why == Why::Invalid && failed.message.contains("outside"), "{}", failed.message);
        let mut builder = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Symlink);
        header.set_size(0);
        builder.append_link(&mut header, "way", "/").expect("appended");
        let mut header = tar::Header::new_gnu();
        header.set_size(1);
        header.set_mode(0o644);
        builder.append_data(&mut header, "way/forktree-out", &b"x"[..]).expect("appended");
        let archive = builder.into_inner().expect("an archive");
        assert!(unpack(&to.0.join("in"), sent(&archive, true)).is_err());
        assert!(!Path::new("/forktree-out").exists());
    }

    #[test]
    fn what_is_no_archive_is_refused() {
        let to = Folder::new("archive-noise");
        assert_eq!(unpack(&to.0, sent(&[b'x'; 2000], true)).expect_err("refused").why, Why::Invalid);
        assert_eq!(unpack(&to.0, sent(b"", true)).expect("an empty one").entries, 0);
    }

    /// An entry as an attacker writes it: nothing of it need be true.
    fn entry(name: &[u8], kind: tar::EntryType, link: &[u8], size: u64, content: &[u8]) -> Vec<u8> {
        let mut header = tar::Header::new_gnu();
        let fields = header.as_gnu_mut().expect("gnu");
        fields.name[..name.len().min(100)].copy_from_slice(&name[..name.len().min(100)]);
        fields.linkname[..link.len().min(100)].copy_from_slice(&link[..link.len().min(100)]);
        header.set_entry_type(kind);
        header.set_mode(0o644);
        header.set_size(size);
        header.set_cksum();
        let mut bytes = header.as_bytes().to_vec();
        bytes.extend(content);
        bytes.resize((bytes.len() + 511) / 512 * 512, 0);
        bytes
    }

    /// All that lies in a folder, with what links lead to left out.
    fn all_in(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
        let (mut found, mut waiting) = (Vec::new(), vec![folder.to_owned()]);
        while let Some(path) = waiting.pop() {
            let kind = fs::symlink_metadata(&path).expect("there").file_type();
            if kind.is_dir() {
                waiting.extend(fs::read_dir(&path).expect("read").map(|each| each.expect("there").path()));
                found.push((path, Vec::new()));
            } else {
                let content = if kind.is_file() { fs::read(&path).expect("read") } else { Vec::new() };
                found.push((path, content));
            }
        }
        found.sort();
        found
    }

    #[test]
    fn links_lead_nothing_out_of_the_folder() {
        let to = Folder::new("archive-links");
        let (outside, inside) = (to.0.join("outside"), to.0.join("in"));
        fs::create_dir_all(&outside).expect("made");
        fs::write(outside.join("secret"), "mine").expect("written");
        let before = all_in(&outside);
        let way = outside.to_string_lossy().into_owned();
        let file = tar::EntryType::Regular;
        let tricks = [
            [entry(b"way", tar::EntryType::Symlink, way.as_bytes(), 0, b""), entry(b"way/new", file, b"", 1, b"x")],
            [entry(b"way", tar::EntryType::Symlink, b"../outside", 0, b""), entry(b"way/secret", file, b"", 1, b"x")],
            [entry(b"a", tar::EntryType::Link, b"../outside/secret", 0, b""), entry(b"a", file, b"", 1, b"x")],
            [
                entry(b"a", tar::EntryType::Link, format!("{way}/secret").as_bytes(), 0, b""),
                entry(b"a", file, b"", 1, b"x"),
            ],
            [
                entry(b"s", tar::EntryType::Symlink, format!("{way}/secret").as_bytes(), 0, b""),
                entry(b"s", file, b"", 1, b"x"),
            ],
            [
                entry(b"way", tar::EntryType::Symlink, way.as_bytes(), 0, b""),
                entry(b"way", tar::EntryType::Directory, b"", 0, b""),
            ],
            [entry(b"/../outside/new", file, b"", 1, b"x"), entry(b"./../outside/new", file, b"", 1, b"x")],
        ];
        for (number, trick) in tricks.iter().enumerate() {
            let _ = fs::remove_dir_all(&inside);
            let _ = unpack(&inside, sent(&trick.concat(), true));
            assert_eq!(all_in(&outside), before, "trick {number}");
        }
    }

    #[test]
    fn a_size_that_is_a_lie_makes_nothing_large() {
        let to = Folder::new("archive-sizes");
        for size in [1_u64 << 33, 1 << 60, u64::MAX] {
            let archive = entry(b"big", tar::EntryType::Regular, b"", size, b"x");
            let failed = unpack(&to.0.join("in"), sent(&archive, true)).expect_err("cut");
            assert_eq!(failed.why, Why::Invalid, "{}", failed.message);
        }
    }

    fn kinds() -> impl Strategy<Value = tar::EntryType> {
        prop_oneof![
            Just(tar::EntryType::Regular),
            Just(tar::EntryType::Directory),
            Just(tar::EntryType::Symlink),
            Just(tar::EntryType::Link),
            Just(tar::EntryType::Fifo),
            Just(tar::EntryType::GNULongName),
            Just(tar::EntryType::GNULongLink),
            Just(tar::EntryType::XHeader),
            Just(tar::EntryType::GNUSparse),
            any::<u8>()
                .prop_filter("no devices: tests run as root", |kind| !(b'3'..=b'4').contains(kind))
                .prop_map(tar::EntryType::new),
        ]
    }

    fn names() -> impl Strategy<Value = String> {
        let part = prop_oneof![
            Just("a"),
            Just("b"),
            Just(".."),
            Just("."),
            Just(""),
            Just("way"),
            Just("outside"),
            Just("secret"),
            Just("nul\0x")
        ];
        proptest::collection::vec(part, 0..5).prop_map(|parts| parts.join("/"))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn no_archive_reaches_out_of_its_folder(
            entries in proptest::collection::vec((names(), kinds(), names(), 0_u64..2000, 0_usize..1200), 0..6),
            cut in 0_usize..2000,
        ) {
            let to = Folder::new("archive-any");
            let (outside, inside) = (to.0.join("outside"), to.0.join("in"));
            fs::create_dir_all(&outside).expect("made");
            fs::write(outside.join("secret"), "mine").expect("written");
            let before = all_in(&outside);
            let mut archive = Vec::new();
            for (name, kind, link, size, length) in &entries {
                let link = link.replace("nul", &to.0.to_string_lossy());
                archive.extend(entry(name.as_bytes(), *kind, link.as_bytes(), *size, &vec![b'x'; *length]));
            }
            let keep = archive.len().saturating_sub(cut % (archive.len() + 1) / 4);
            let _ = unpack(&inside, sent(&archive[..keep], cut % 3 > 0));
            prop_assert_eq!(all_in(&outside), before);
            let others = fs::read_dir(&to.0).expect("read").count();
            prop_assert_eq!(others, 2, "nothing beside the two folders");
        }

        #[test]
        fn what_is_no_archive_breaks_nothing(bytes in proptest::collection::vec(any::<u8>(), 0..3000)) {
            let to = Folder::new("archive-bytes");
            let _ = unpack(&to.0.join("in"), sent(&bytes, true));
            prop_assert_eq!(fs::read_dir(&to.0).expect("read").count(), 1);
        }
    }
}
