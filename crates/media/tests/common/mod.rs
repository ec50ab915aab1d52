//! Helpers that several tests need.

use std::process::Command;

/// A block device over a file, if this process may attach one. It is detached when dropped.
pub(crate) struct LoopDevice(String);

impl LoopDevice {
    /// A device of `blocks` blocks of 4096 bytes over a new file at `path`.
    pub(crate) fn over(path: &str, blocks: u64) -> Option<LoopDevice> {
        std::fs::write(path, vec![0; blocks as usize * 4096]).unwrap();
        let output = Command::new("losetup").args(["--find", "--show", path]).output().ok()?;
        let name = String::from_utf8(output.stdout).ok()?.trim().to_owned();
        (output.status.success() && !name.is_empty()).then_some(LoopDevice(name))
    }

    /// Its path.
    pub(crate) fn name(&self) -> &str {
        &self.0
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let detached = Command::new("losetup").args(["--detach", &self.0]).status();
        assert!(detached.is_ok_and(|status| status.success()), "can't detach {}", self.0);
    }
}
