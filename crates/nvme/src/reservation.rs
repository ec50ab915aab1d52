//! Reservations: the fields and the data of their commands (Base §7.2 to §7.5, §8.19).

use crate::bytes::{put, put_u16, put_u32, put_u64, u64_at};
use crate::command::Sqe;

/// RESCAP of Identify Namespace: all six types. Bit 0, persistence through power loss, is clear. Bit 7:
/// Ignore Existing Key is used as Base 1.3 and later define it.
pub const RESCAP: u8 = 0xfe;

/// A reservation type (Base Figure 453).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Only the holder may write.
    WriteExclusive = 1,
    /// Only the holder may read and write.
    ExclusiveAccess = 2,
    /// Only registrants may write.
    WriteExclusiveRegistrants = 3,
    /// Only registrants may read and write.
    ExclusiveAccessRegistrants = 4,
    /// Only registrants may write, and each of them is a holder.
    WriteExclusiveAll = 5,
    /// Only registrants may read and write, and each of them is a holder.
    ExclusiveAccessAll = 6,
}

impl Kind {
    /// The type with this number (RTYPE).
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::WriteExclusive,
            2 => Self::ExclusiveAccess,
            3 => Self::WriteExclusiveRegistrants,
            4 => Self::ExclusiveAccessRegistrants,
            5 => Self::WriteExclusiveAll,
            6 => Self::ExclusiveAccessAll,
            _ => return None,
        })
    }

    /// Whether every registrant is a holder.
    #[must_use]
    pub const fn is_held_by_all(self) -> bool {
        matches!(self, Self::WriteExclusiveAll | Self::ExclusiveAccessAll)
    }

    /// Whether registrants that are no holders may read and write.
    #[must_use]
    pub const fn admits_registrants(self) -> bool {
        !matches!(self, Self::WriteExclusive | Self::ExclusiveAccess)
    }

    /// Whether others may read.
    #[must_use]
    pub const fn admits_readers(self) -> bool {
        matches!(
            self,
            Self::WriteExclusive | Self::WriteExclusiveRegistrants | Self::WriteExclusiveAll
        )
    }
}

impl Sqe {
    /// Action of a reservation command (RREGA, RACQA, RRELA), dword 10 bits 2:0.
    #[must_use]
    pub fn reservation_action(&self) -> u8 {
        self.dword(10) as u8 & 7
    }

    /// Ignore Existing Key of a reservation command, dword 10 bit 3.
    #[must_use]
    pub fn ignores_existing_key(&self) -> bool {
        self.dword(10) & 1 << 3 != 0
    }

    /// Reservation type of Reservation Acquire and Release (RTYPE), dword 10 bits 15:8.
    #[must_use]
    pub fn reservation_type(&self) -> u8 {
        (self.dword(10) >> 8) as u8
    }

    /// Change Persist Through Power Loss State of Reservation Register (CPTPL), dword 10 bits 31:30.
    #[must_use]
    pub fn changes_persistence(&self) -> u8 {
        (self.dword(10) >> 30) as u8
    }

    /// Bytes asked for by Reservation Report, at least 4 (dword 10 holds one dword less).
    #[must_use]
    pub fn report_len(&self) -> u64 {
        (u64::from(self.dword(10)) + 1) * 4
    }

    /// Whether Reservation Report asks for the extended data structure (EDS), dword 11 bit 0.
    #[must_use]
    pub fn report_is_extended(&self) -> bool {
        self.dword(11) & 1 != 0
    }
}

/// The data of Reservation Register and Acquire: 16 bytes. That of Release is its first 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Keys {
    /// Byte 0: the host's current key (CRKEY).
    pub current: u64,
    /// Byte 8: the new key of Register (NRKEY), or the key to preempt of Acquire (PRKEY).
    pub other: u64,
}

impl Keys {
    /// Length of the data of Register and Acquire in bytes.
    pub const LEN: u32 = 16;
    /// Length of the data of Release in bytes.
    pub const RELEASE_LEN: u32 = 8;

    /// Reads the data: 16 bytes, or 8 bytes of a Release.
    #[must_use]
    pub fn decode(data: &[u8]) -> Option<Self> {
        match data.len() {
            8 => Some(Self { current: u64_at(data, 0), other: 0 }),
            16 => Some(Self { current: u64_at(data, 0), other: u64_at(data, 8) }),
            _ => None,
        }
    }
}

/// Offset of the first registrant in the extended data structure of Reservation Report, and length
/// of each.
pub const REPORT_ENTRY_LEN: usize = 64;
/// Controller identifier of a registrant whose controllers are dynamic.
const CNTLID_DYNAMIC: u16 = 0xffff;

/// A registrant in Reservation Report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReportEntry {
    /// Whether it holds the reservation (RCSTS bit 0).
    pub holds: bool,
    /// Its key.
    pub key: u64,
    /// Its host identifier.
    pub hostid: [u8; 16],
}

/// Reservation Report: the extended data structure (Base Figure 457), with as many registrants as fit
/// into `len` bytes. The number of registrants is that of all.
#[must_use]
pub fn report(
    generation: u32,
    kind: Option<Kind>,
    registrants: &[ReportEntry],
    len: usize,
) -> alloc::vec::Vec<u8> {
    let mut bytes = alloc::vec![0; len.max(REPORT_ENTRY_LEN)];
    put_u32(&mut bytes, 0, generation);
    bytes[4] = kind.map_or(0, |kind| kind as u8);
    put_u16(&mut bytes, 5, registrants.len() as u16);
    let fitting = bytes.len() / REPORT_ENTRY_LEN - 1;
    for (number, entry) in registrants.iter().take(fitting).enumerate() {
        let at = REPORT_ENTRY_LEN * (number + 1);
        put_u16(&mut bytes, at, CNTLID_DYNAMIC);
        bytes[at + 2] = u8::from(entry.holds);
        put_u64(&mut bytes, at + 8, entry.key);
        put(&mut bytes, at + 16, &entry.hostid);
    }
    bytes.truncate(len);
    bytes
}

/// A change of which registrants are informed (Base Figure 240, type).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Notification {
    /// The host is not registered any more, because another one has preempted it.
    RegistrationPreempted = 1,
    /// A reservation that registrants share has ended.
    ReservationReleased = 2,
    /// Another host has cleared the reservation and all registrations.
    ReservationPreempted = 3,
}

impl Notification {
    /// Bit of the Reservation Notification Mask: with it, hosts are not informed of this change.
    #[must_use]
    pub const fn mask_bit(self) -> u32 {
        1 << self as u8
    }
}

/// All bits of the Reservation Notification Mask.
pub const MASK_BITS: u32 = 0b1110;

/// Length of the Reservation Notification log page in bytes.
pub const NOTIFICATION_LEN: usize = 64;

/// Reservation Notification: the oldest one that the host has not read, with its number and how many
/// others follow it. Without one, all bytes are zero.
#[must_use]
pub fn notification_page(
    oldest: Option<(u64, Notification, u32)>,
    others: usize,
) -> [u8; NOTIFICATION_LEN] {
    let mut bytes = [0; NOTIFICATION_LEN];
    if let Some((count, kind, nsid)) = oldest {
        put_u64(&mut bytes, 0, count);
        bytes[8] = kind as u8;
        bytes[9] = others.min(255) as u8;
        put_u32(&mut bytes, 12, nsid);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_as_many_registrants_as_fit() {
        let entry = ReportEntry { holds: true, key: 0x0102, hostid: [7; 16] };
        let bytes = report(9, Some(Kind::WriteExclusiveAll), &[entry; 2], 131);
        assert_eq!(bytes.len(), 131);
        assert_eq!(bytes[..10], [9, 0, 0, 0, 5, 2, 0, 0, 0, 0]);
        assert_eq!(bytes[64..67], [0xff, 0xff, 1]);
        assert_eq!(bytes[72..80], [2, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[80..96], [7; 16]);
        assert_eq!(bytes[128..], [0; 3], "the second does not fit");
        assert_eq!(report(1, None, &[], 4), [1, 0, 0, 0]);
    }

    #[test]
    fn notification_bytes() {
        let bytes = notification_page(Some((9, Notification::ReservationReleased, 7)), 300);
        assert_eq!(bytes[..16], [9, 0, 0, 0, 0, 0, 0, 0, 2, 255, 0, 0, 7, 0, 0, 0]);
        assert_eq!(notification_page(None, 0), [0; 64]);
        let all = [
            Notification::RegistrationPreempted,
            Notification::ReservationReleased,
            Notification::ReservationPreempted,
        ];
        assert_eq!(all.iter().fold(0, |bits, kind| bits | kind.mask_bit()), MASK_BITS);
    }

    #[test]
    fn fields_of_the_commands() {
        let mut sqe = Sqe::default();
        sqe.set_dword(10, 2 | 1 << 3 | 6 << 8 | 2 << 30);
        assert_eq!((sqe.reservation_action(), sqe.ignores_existing_key()), (2, true));
        assert_eq!((sqe.reservation_type(), sqe.changes_persistence()), (6, 2));
        sqe.set_dword(10, u32::MAX);
        assert_eq!(sqe.report_len(), 1 << 34);
        let bytes: alloc::vec::Vec<u8> = (1..=16).collect();
        let keys = Keys::decode(&bytes).unwrap();
        assert_eq!((keys.current, keys.other), (0x0807_0605_0403_0201, 0x100f_0e0d_0c0b_0a09));
        assert_eq!(Keys::decode(&bytes[..8]).unwrap().other, 0);
        assert_eq!(Keys::decode(&bytes[..9]), None);
    }
}
