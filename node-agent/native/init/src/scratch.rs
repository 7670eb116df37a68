//! Folders for tests, gone with them.

use std::fs;
use std::path::PathBuf;

pub struct Folder(pub PathBuf);

impl Folder {
    /// `name` is the test's own among all tests of this program.
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("forktree-init-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).expect("a folder");
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
