//! The file tools: what the host asks of files in a machine is done by a command in it, which is this program again.

use crate::archive::{pack, unpack};
use crate::transfer::{tell, Failed, Sent, Why};
use serde::Serialize;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::io::{AsFd, AsRawFd, RawFd};
use std::path::{Path, PathBuf};

const DEFAULT_MODE: u32 = 0o644;

/// Of a mode, what is about permissions.
const MODE_BITS: u32 = 0o7777;

/// What is told of a file before its bytes.
#[derive(Serialize)]
struct Readable {
    mode: u32,
    /// None: it is read to its end, wherever that is. Files of /proc say 0 and are not empty.
    bytes: Option<u64>,
}

#[derive(Serialize)]
struct Written {
    path: String,
    bytes: u64,
}

#[derive(Serialize)]
struct Entry {
    name: String,
    #[serde(rename = "type")]
    kind: &'static str,
    bytes: u64,
    mode: u32,
    /// Seconds since 1970.
    mtime: i64,
}

/// Do what the arguments say. Returns the exit code: 0 where all was done and told.
pub fn run(arguments: &[String]) -> i32 {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    // Not `Stdout`, which looks for the ends of lines.
    let mut output = match io::stdout().as_fd().try_clone_to_owned() {
        Ok(output) => File::from(output),
        Err(_) => return 1,
    };
    let done = match arguments.as_slice() {
        ["read", path] => read(Path::new(path), &mut output),
        ["write", path, mode] => answer(&mut output, &write(Path::new(path), mode, Sent::new(Input(io::stdin())))),
        ["list", path] => list(Path::new(path), &mut output),
        ["remove", path, depth] => answer(&mut output, &remove(Path::new(path), *depth == "all")),
        ["pack", path] => pack(Path::new(path), &mut output),
        ["connect", port] => crate::relay::relay(port, &mut output),
        ["unpack", path] => answer(&mut output, &unpack(Path::new(path), Sent::new(Input(io::stdin())))),
        _ => answer::<()>(&mut output, &Err(Failed::new(Why::Invalid, "there is no such file tool"))),
    };
    i32::from(done.is_err())
}

/// Standard input, read no further than asked.
struct Input(io::Stdin);

impl Read for Input {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        crate::sys::read_available(&self.0, buffer)?.ok_or_else(|| io::ErrorKind::Interrupted.into())
    }
}

impl AsRawFd for Input {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

fn answer<T: Serialize>(output: &mut impl Write, outcome: &Result<T, Failed>) -> io::Result<()> {
    tell(output, outcome)?;
    outcome.as_ref().map(drop).map_err(|failed| io::Error::new(io::ErrorKind::Other, failed.message.clone()))
}

fn read(path: &Path, output: &mut impl Write) -> io::Result<()> {
    let (file, readable) = match readable(path) {
        Ok(found) => found,
        Err(failed) => return answer::<()>(output, &Err(failed)),
    };
    let bytes = readable.bytes;
    tell(output, &Ok(readable))?;
    let copied = io::copy(&mut file.take(bytes.unwrap_or(u64::MAX)), output)?;
    output.flush()?;
    match bytes {
        Some(bytes) if copied < bytes => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(()),
    }
}

fn readable(path: &Path) -> Result<(File, Readable), Failed> {
    let failed = |error: io::Error| Failed::of(&format!("cannot read {}", path.display()), &error);
    // A pipe would be waited for.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(failed)?;
    let found = file.metadata().map_err(failed)?;
    if !found.is_file() {
        return Err(Failed::new(Why::WrongKind, format!("{} is a {}, not a file", path.display(), kind(&found))));
    }
    let bytes = Some(found.len()).filter(|bytes| *bytes > 0);
    Ok((file, Readable { mode: found.mode() & MODE_BITS, bytes }))
}

fn kind(found: &Metadata) -> &'static str {
    let kind = found.file_type();
    match () {
        () if kind.is_file() => "file",
        () if kind.is_dir() => "directory",
        () if kind.is_symlink() => "symlink",
        () if kind.is_fifo() => "fifo",
        () if kind.is_socket() => "socket",
        () => "device",
    }
}

/// All or nothing: what was there is there until the new content is complete.
fn write(path: &Path, mode: &str, mut content: Sent<impl Read + AsRawFd>) -> Result<Written, Failed> {
    let failed = |error: io::Error| Failed::of(&format!("cannot write {}", path.display()), &error);
    // Through a link that leads somewhere: it is to go on leading there.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let before = fs::metadata(&target).ok();
    if let Some(found) = before.as_ref().filter(|found| !found.is_file()) {
        return Err(Failed::new(Why::WrongKind, format!("{} is a {}, not a file", path.display(), kind(found))));
    }
    let mode = match (mode, before) {
        ("", Some(found)) => found.mode() & MODE_BITS,
        ("", None) => DEFAULT_MODE,
        (given, _) => u32::from_str_radix(given, 8)
            .map_err(|_| Failed::new(Why::Invalid, format!("{given:?} is no octal mode")))?,
    };
    let folder = match (target.parent(), target.file_name()) {
        (Some(folder), Some(_)) => folder,
        _ => return Err(Failed::new(Why::WrongKind, format!("{} names no file", path.display()))),
    };
    make_folders(folder).map_err(failed)?;
    let spare = Spare::create(folder).map_err(failed)?;
    let bytes = io::copy(&mut content, &mut &spare.file).map_err(failed)?;
    spare.file.set_permissions(fs::Permissions::from_mode(mode)).map_err(failed)?;
    spare.become_file(&target).map_err(failed)?;
    Ok(Written { path: path.to_string_lossy().into_owned(), bytes })
}

pub fn make_folders(folder: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o755).create(folder)
}

/// A file that nobody sees under its name yet, and that goes unless it becomes one.
struct Spare {
    file: File,
    path: PathBuf,
    is_kept: bool,
}

impl Spare {
    fn create(folder: &Path) -> io::Result<Self> {
        let path = folder.join(format!(".forktree-{}", std::process::id()));
        // Left by one that was killed, with a number that is ours now.
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => (),
        }
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        Ok(Self { file, path, is_kept: false })
    }

    fn become_file(mut self, target: &Path) -> io::Result<()> {
        fs::rename(&self.path, target)?;
        self.is_kept = true;
        Ok(())
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        if !self.is_kept {
            let _ = fs::remove_file(&self.path); // Nobody is left to be told.
        }
    }
}

fn list(path: &Path, output: &mut impl Write) -> io::Result<()> {
    let outcome = entries(path);
    match outcome {
        Err(failed) => answer::<()>(output, &Err(failed)),
        Ok(entries) => {
            tell(output, &Ok(entries.len()))?;
            let mut lines = io::BufWriter::new(output);
            for entry in entries {
                serde_json::to_writer(&mut lines, &entry)?;
                lines.write_all(b"\n")?;
            }
            lines.flush()
        }
    }
}

/// What a folder holds, by name; of anything else, itself.
fn entries(path: &Path) -> Result<Vec<Entry>, Failed> {
    let failed = |error: io::Error| Failed::of(&format!("cannot list {}", path.display()), &error);
    let found = fs::metadata(path).map_err(failed)?;
    if !found.is_dir() {
        return Err(Failed::new(Why::WrongKind, format!("{} is a {}, not a directory", path.display(), kind(&found))));
    }
    let mut entries = Vec::new();
    for each in fs::read_dir(path).map_err(failed)? {
        let each = each.map_err(failed)?;
        if let Ok(found) = each.metadata() {
            // Else it is gone meanwhile.
            let name = each.file_name().to_string_lossy().into_owned();
            let (bytes, mode, mtime) = (found.len(), found.mode() & MODE_BITS, found.mtime());
            entries.push(Entry { name, kind: kind(&found), bytes, mode, mtime });
        }
    }
    entries.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(entries)
}

fn remove(path: &Path, all: bool) -> Result<bool, Failed> {
    let failed = |error: io::Error| Failed::of(&format!("cannot remove {}", path.display()), &error);
    let found = fs::symlink_metadata(path).map_err(failed)?;
    match (found.is_dir(), all) {
        (false, _) => fs::remove_file(path),
        (true, false) => fs::remove_dir(path),
        (true, true) => fs::remove_dir_all(path),
    }
    .map_err(failed)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Folder;
    use std::os::unix::fs::symlink;

    fn sent(content: &[u8], whole: bool) -> Sent<File> {
        let mut bytes = u32::try_from(content.len()).expect("short").to_be_bytes().to_vec();
        bytes.extend(content);
        if whole {
            bytes.extend([0; 4]);
        }
        Sent::new(File::from(crate::sys::memory_file(&bytes).expect("a file")))
    }

    #[test]
    fn a_file_is_written_whole_or_not_at_all() {
        let folder = Folder::new("files-write");
        let path = folder.0.join("new/folder/file");
        assert_eq!(write(&path, "640", sent(b"one", true)).expect("written").bytes, 3);
        assert_eq!(fs::metadata(&path).expect("there").mode() & MODE_BITS, 0o640);
        let cut = write(&path, "", sent(b"two", false)).err().expect("refused");
        assert_eq!(cut.why, Why::Invalid, "{}", cut.message);
        assert_eq!(fs::read(&path).expect("read"), b"one");
        assert_eq!(fs::read_dir(path.parent().expect("a folder")).expect("listed").count(), 1, "nothing is left");
        write(&path, "", sent(b"three", true)).expect("written");
        assert_eq!(fs::metadata(&path).expect("there").mode() & MODE_BITS, 0o640, "as it was");
        assert_eq!(write(&folder.0, "", sent(b"", true)).err().expect("refused").why, Why::WrongKind);
        assert_eq!(write(&path.join("below"), "", sent(b"", true)).err().expect("refused").why, Why::WrongKind);
        assert_eq!(write(&path, "9", sent(b"", true)).err().expect("refused").why, Why::Invalid);
    }

    #[test]
    fn what_a_link_leads_to_is_written() {
        let folder = Folder::new("files-link");
        let (link, file) = (folder.0.join("link"), folder.0.join("file"));
        symlink("file", &link).expect("a link");
        write(&link, "", sent(b"first", true)).expect("the link leads nowhere, so it is replaced");
        assert!(!file.exists());
        fs::remove_file(&link).expect("removed");
        fs::write(&file, "old").expect("written");
        symlink("file", &link).expect("a link");
        write(&link, "", sent(b"second", true)).expect("written");
        assert_eq!(fs::read(&file).expect("read"), b"second");
        assert!(fs::symlink_metadata(&link).expect("there").is_symlink());
    }

    #[test]
    fn only_files_are_read_and_only_folders_listed() {
        let folder = Folder::new("files-read");
        let path = folder.0.join("file");
        fs::write(&path, "text").expect("written");
        let mut output = Vec::new();
        read(&path, &mut output).expect("read");
        assert_eq!(output, b"{\"ok\":{\"mode\":420,\"bytes\":4},\"why\":null,\"message\":null}\ntext");
        for (path, why) in [(folder.0.clone(), Why::WrongKind), (folder.0.join("none"), Why::NotFound)] {
            assert_eq!(readable(&path).err().expect("refused").why, why);
        }
        assert_eq!(readable(Path::new("/proc/version")).expect("there").1.bytes, None);
        let listed = entries(&folder.0).unwrap_or_default();
        assert_eq!(listed.iter().map(|entry| (entry.name.as_str(), entry.bytes)).collect::<Vec<_>>(), [("file", 4)]);
        assert_eq!(entries(&path).err().expect("refused").why, Why::WrongKind);
    }

    #[test]
    fn a_full_folder_is_only_removed_when_it_was_meant() {
        let folder = Folder::new("files-remove");
        fs::create_dir(folder.0.join("sub")).expect("made");
        fs::write(folder.0.join("sub/file"), "").expect("written");
        assert_eq!(remove(&folder.0.join("sub"), false).expect_err("refused").why, Why::NotEmpty);
        assert_eq!(remove(&folder.0.join("sub"), true), Ok(true));
        assert_eq!(remove(&folder.0.join("sub"), true).expect_err("refused").why, Why::NotFound);
    }
}
