//! A drive of ordinary files: its properties are a file, its memory another one. Nothing enables or
//! disables it by itself.

use std::os::unix::fs::{FileExt, symlink};

use riopipe_order::log_region::LogKind;
use riopipe_order::region::Region;

use super::*;
use crate::log::LogStore;
use crate::survival::Kept;

const ADDRESS: &str = "0000:41:00.0";
const PMRS: u64 = 1 << 56;
/// BAR 4, the barrier is a read of PMRSTS.
const PMRCAP: u32 = 0b10 << 10 | 4 << 5;
const LEN: usize = 64 << 10;

struct FakeDrive {
    root: tempfile::TempDir,
}

impl FakeDrive {
    fn new() -> Self {
        let drive = Self { root: tempfile::tempdir().unwrap() };
        std::fs::create_dir(drive.path("")).unwrap();
        drive.put("class", "0x010802\n");
        drive.put("enable", "1\n");
        std::fs::write(drive.path("resource0"), [0; 16384]).unwrap();
        std::fs::write(drive.path("resource4"), vec![0; LEN]).unwrap();
        drive.set(offset::CAP, &PMRS.to_le_bytes());
        drive.set_property(offset::PMRCAP, PMRCAP);
        drive
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(ADDRESS).join(name)
    }

    fn put(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    fn text(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }

    fn set(&self, offset: usize, bytes: &[u8]) {
        let file = OpenOptions::new().write(true).open(self.path("resource0")).unwrap();
        file.write_all_at(bytes, offset as u64).unwrap();
    }

    fn set_property(&self, offset: usize, value: u32) {
        self.set(offset, &value.to_le_bytes());
    }

    fn property(&self, offset: usize) -> u32 {
        let mut bytes = [0; 4];
        let file = File::open(self.path("resource0")).unwrap();
        file.read_exact_at(&mut bytes, offset as u64).unwrap();
        u32::from_le_bytes(bytes)
    }

    fn open(&self) -> Result<LogStore, OpenError> {
        let lock_wait = LockWait::within(Duration::ZERO);
        LogStore::in_drive_memory(self.root.path(), &PciAddress::parse(ADDRESS).unwrap(), lock_wait)
    }

    fn read(&self) -> Result<ReadMemory, OpenError> {
        ReadMemory::open(self.root.path(), &PciAddress::parse(ADDRESS).unwrap())
    }

    /// The text of the error of opening it, which has each of `parts`.
    fn refused(&self, parts: &[&str]) -> String {
        let error = self.open().err().expect("it is refused").to_string();
        for part in parts {
            assert!(error.contains(part), "{part:?} in {error:?}");
        }
        error
    }
}

#[test]
fn a_region_is_enabled_before_it_is_used_and_keeps_what_is_written() {
    let drive = FakeDrive::new();
    assert_eq!(drive.property(offset::PMRCTL), 0);
    let log = drive.open().unwrap();
    assert_eq!(drive.property(offset::PMRCTL), PMRCTL_ENABLE, "a disabled one drops all stores");
    assert_eq!((log.len(), log.kind(), log.is_restored()), (LEN, LogKind::Pci, true));
    assert_eq!(log.survives().power_cut, Kept::Completed);
    assert_eq!(log.survives().process_kill, Kept::Completed);
    for part in [ADDRESS, "BAR 4", "64 KiB", "PMRSTS"] {
        assert!(log.describe().contains(part), "{}", log.describe());
    }
    let mut part = log.part(4096..8192).unwrap();
    part.write(64, &[7; 64]);
    part.write_word(128, 0x0102_0304_0506_0708);
    part.fence().unwrap();
    log.check().unwrap();
    drop((log, part));
    let bytes = std::fs::read(drive.path("resource4")).unwrap();
    assert_eq!(
        bytes[4096 + 64..4096 + 136],
        [[7; 64].as_slice(), &[8, 7, 6, 5, 4, 3, 2, 1]].concat()
    );
    // Read by the next process.
    let log = drive.open().unwrap();
    let mut back = [0; 72];
    log.part(4096..8192).unwrap().read(64, &mut back);
    assert_eq!(back, bytes[4096 + 64..4096 + 136]);
}

#[test]
fn p6_a_fence_fails_when_the_drive_does() {
    for (property, value, text) in [
        (offset::PMRSTS, 0x11, "PMRSTS.ERR is 0x11"),
        (offset::PMRSTS, 2 << 9, "read only"),
        (offset::PMRCTL, 0, "not enabled"),
        (offset::PMRSTS, u32::MAX, "does not answer"),
    ] {
        let drive = FakeDrive::new();
        let log = drive.open().unwrap();
        let mut parts = [log.part(0..4096).unwrap(), log.part(8192..12288).unwrap()];
        parts[0].fence().unwrap();
        parts[0].check().unwrap();
        log.check_access().unwrap();
        drive.set_property(property, value);
        for part in &mut parts {
            part.write_word(0, 1);
            let error = part.fence().unwrap_err().to_string();
            assert!(error.contains(text) && error.contains(ADDRESS), "{error}");
            assert!(part.check().is_err(), "what is read from now on may be anything");
        }
        assert!(log.check_access().is_err(), "an idle target notices it, too");
    }
}

#[test]
fn a_drive_that_is_removed_fails_its_fences_and_no_process() {
    let drive = FakeDrive::new();
    let log = drive.open().unwrap();
    let mut part = log.part(8192..12288).unwrap();
    part.write_word(0, 1);
    part.fence().unwrap();
    // The next access finds no page.
    File::options().write(true).open(drive.path("resource4")).unwrap().set_len(0).unwrap();
    part.write_word(0, 2);
    let error = part.fence().unwrap_err().to_string();
    assert!(error.contains("does not answer"), "{error}");
}

#[test]
fn t24_content_that_was_not_restored_is_reported_and_can_be_replaced() {
    let drive = FakeDrive::new();
    drive.set_property(offset::PMRSTS, 1 << 9);
    let log = drive.open().unwrap();
    assert!(!log.is_restored());
    // What is written from now on is persistent.
    log.part(0..4096).unwrap().fence().unwrap();
}

#[test]
fn t8_a_region_is_locked_while_it_is_served() {
    let drive = FakeDrive::new();
    let log = drive.open().unwrap();
    let part = log.part(0..64).unwrap();
    drop(log);
    assert!(matches!(drive.open(), Err(OpenError::Locked { .. })), "a part is still in use");
    drive.refused(&["resource4", "in use by another process"]);
    let reader = drive.read().unwrap();
    assert!(reader.is_served);
    drop(part);
    drive.open().unwrap();
}

#[test]
fn it_is_read_without_being_opened_for_service() {
    let drive = FakeDrive::new();
    let log = drive.open().unwrap();
    let mut part = log.part(4096..8192).unwrap();
    part.write(0, &[9; 16]);
    part.fence().unwrap();
    drop((log, part));
    // As after a power cut.
    drive.set_property(offset::PMRCTL, 0);
    let reader = drive.read().unwrap();
    assert_eq!((reader.is_served, reader.len()), (false, LEN));
    let mut back = [0; 24];
    reader.read(4096, &mut back).unwrap();
    assert_eq!(back, [[9; 16].as_slice(), &[0; 8]].concat()[..]);
    drive.set_property(offset::PMRSTS, 3 << 9);
    let error = reader.read(4096, &mut back).unwrap_err().to_string();
    assert!(error.contains("unreliable"), "{error}");
}

#[test]
fn what_can_not_hold_a_log_is_refused_with_what_to_do() {
    let drive = FakeDrive::new();
    drive.set(offset::CAP, &[0; 8]);
    drive.refused(&[ADDRESS, "no Persistent Memory Region", "CAP.PMRS", "block:"]);

    let drive = FakeDrive::new();
    drive.set_property(offset::PMRCAP, 4 << 5);
    drive.refused(&["PMRCAP.PMRWBM is 0x0"]);

    let drive = FakeDrive::new();
    drive.set_property(offset::PMRSTS, 0x21);
    drive.refused(&["PMRSTS.ERR is 0x21", "/reset"]);

    let drive = FakeDrive::new();
    drive.set_property(offset::PMRSTS, 3 << 9);
    drive.refused(&["unreliable", "PMRSTS.HSTS is 3"]);

    let drive = FakeDrive::new();
    drive.set_property(offset::PMRSTS, 1 << 8);
    drive.refused(&["not ready", "PMRSTS.NRDY is 1"]);

    let drive = FakeDrive::new();
    std::fs::write(drive.path("resource4"), [0; 100]).unwrap();
    drive.refused(&["100 bytes"]);

    let drive = FakeDrive::new();
    drive.put("class", "0x020000\n");
    drive.refused(&["not an NVMe drive", "0x020000", "lspci"]);

    let drive = FakeDrive::new();
    std::fs::remove_dir_all(drive.path("")).unwrap();
    drive.refused(&[ADDRESS, "no such PCI device", "lspci"]);
}

#[test]
fn a_device_that_is_off_is_switched_on_once() {
    let drive = FakeDrive::new();
    drive.put("enable", "0\n");
    drive.open().unwrap();
    assert_eq!(drive.text("enable"), "1");
    drive.put("enable", "3\n");
    drive.open().unwrap();
    assert_eq!(drive.text("enable"), "3\n", "a driver has it");
}

#[test]
fn a_mapping_that_the_kernel_refuses_names_the_driver_and_the_ways_out() {
    let drive = FakeDrive::new();
    let resource = drive.path("resource0");
    let refused = || io::Error::from_raw_os_error(libc::EINVAL);
    let error = map_error(&drive.path(""), &resource, refused()).to_string();
    assert!(!error.contains("iomem"), "no driver has it: {error}");
    symlink("../../bus/pci/drivers/nvme", drive.path("driver")).unwrap();
    let error = map_error(&drive.path(""), &resource, refused()).to_string();
    for part in ["driver nvme", "iomem=relaxed", &format!("echo {ADDRESS} > "), "nvme/unbind"] {
        assert!(error.contains(part), "{part:?} in {error:?}");
    }
    let locked_down = io::Error::from_raw_os_error(libc::EPERM);
    let error = map_error(&drive.path(""), &resource, locked_down).to_string();
    assert!(error.contains("lockdown") && !error.contains("iomem"), "{error}");
    let other = io::Error::from_raw_os_error(libc::EACCES);
    let error = map_error(&drive.path(""), &resource, other).to_string();
    assert!(error.contains("needs permission") && !error.contains("iomem"), "{error}");
}
