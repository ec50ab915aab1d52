//! The record with which a target reports the extension in Identify Controller.

use riopipe_order::log_region::LogKind;
use riopipe_order::probe::{self, Plant};

use super::{array_at, u16_at, u32_at};

/// The version of the extension that this crate implements.
pub const EXTENSION_VERSION: u16 = 1;
/// The offset of the extension's record in Identify Controller (its vendor area, bytes 3072–4095).
pub const EXTENSION_OFFSET: usize = 3072;
/// The magic number of the record.
pub const EXTENSION_MAGIC: [u8; 8] = *b"RIOPIPE\x01";

/// The bytes of the record.
const RECORD_LEN: usize = 48;

/// The extension's record in Identify Controller.
///
/// | byte | field |
/// |---|---|
/// | 0–7 | magic `RIOPIPE\x01` |
/// | 8–9 | version |
/// | 10 | log kind |
/// | 11 | bit 0: the log is in the target's memory, and ends with its process |
/// | 12–15 | incarnation of the target |
/// | 16–31 | log region's id |
/// | 32–47 | boot id of the target's machine |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extension {
    /// Version of the extension.
    pub version: u16,
    /// The kind of the log region; `None` if the target has no ordering log, so that engine `rio`
    /// can't run there.
    pub log_kind: Option<LogKind>,
    /// Whether the log is in the memory of the target's process, and ends with it.
    pub log_in_memory: bool,
    /// The number of the target's incarnation.
    pub incarnation: u32,
    /// The id of the log region.
    pub region: [u8; 16],
    /// The boot id of the machine on which the target runs.
    pub boot: [u8; 16],
}

impl Extension {
    /// Writes the record into Identify Controller data (4096 bytes).
    pub fn put(&self, identify: &mut [u8]) {
        let record = &mut identify[EXTENSION_OFFSET..EXTENSION_OFFSET + RECORD_LEN];
        record[0..8].copy_from_slice(&EXTENSION_MAGIC);
        record[8..10].copy_from_slice(&self.version.to_le_bytes());
        record[10] = self.log_kind.map_or(0, |kind| kind as u8);
        record[11] = u8::from(self.log_in_memory);
        record[12..16].copy_from_slice(&self.incarnation.to_le_bytes());
        record[16..32].copy_from_slice(&self.region);
        record[32..48].copy_from_slice(&self.boot);
    }

    /// Finds the record; `None` if the target doesn't have the extension, has another version of
    /// it, or reports a log kind that this version doesn't know (trap T17).
    #[must_use]
    pub fn find(identify: &[u8]) -> Option<Self> {
        let record = identify.get(EXTENSION_OFFSET..EXTENSION_OFFSET + RECORD_LEN)?;
        if record[0..8] != EXTENSION_MAGIC {
            return assumed_extension();
        }
        let version = u16_at(record, 8);
        if version != EXTENSION_VERSION {
            return None;
        }
        let log_kind = match record[10] {
            0 => None,
            code => Some(LogKind::from_code(code)?),
        };
        Some(Self {
            version,
            log_kind,
            log_in_memory: record[11] & 1 != 0,
            incarnation: u32_at(record, 12),
            region: array_at(record, 16),
            boot: array_at(record, 32),
        })
    }
}

/// The record of a target that reports none. It is `None`, because nothing may be assumed about
/// such a target (trap T17). Only a plant, which removes this defence on purpose, returns a record.
fn assumed_extension() -> Option<Extension> {
    let (version, log_kind) = (EXTENSION_VERSION, Some(LogKind::Dax));
    let (incarnation, region, boot) = (1, [0; 16], [0; 16]);
    probe::is_bug_planted(Plant::T17AssumeExtension).then_some(Extension {
        version,
        log_kind,
        log_in_memory: false,
        incarnation,
        region,
        boot,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_extension_is_found_only_where_it_is() {
        let extension = Extension {
            version: EXTENSION_VERSION,
            log_kind: Some(LogKind::File),
            log_in_memory: false,
            incarnation: 0x8192_a3b4,
            region: core::array::from_fn(|i| 0x10 + i as u8),
            boot: core::array::from_fn(|i| 0x20 + i as u8),
        };
        let mut identify = [0; 4096];
        assert_eq!(Extension::find(&identify), None);
        let some = [LogKind::File, LogKind::Dax, LogKind::Block, LogKind::Pci].map(Some);
        for (log_kind, code) in core::iter::once(None).chain(some).zip(0..) {
            let log_in_memory = code == 1;
            let extension = Extension { log_kind, log_in_memory, ..extension };
            extension.put(&mut identify);
            assert_eq!(identify[EXTENSION_OFFSET + 10..][..2], [code, log_in_memory.into()]);
            assert_eq!(Extension::find(&identify), Some(extension));
        }
        identify[EXTENSION_OFFSET + 10] = 5;
        assert_eq!(Extension::find(&identify), None, "an unknown kind of log");
        assert_eq!(Extension::find(&identify[..EXTENSION_OFFSET + 47]), None);
        extension.put(&mut identify);
        identify[EXTENSION_OFFSET + 8] = 9;
        assert_eq!(Extension::find(&identify), None, "another version is not used (T17)");
    }
}
