//! Vendor specific status codes: those of status code type 7h, and one of the type of media errors.

use alloc::string::{String, ToString};

use riopipe_nvme::command::Status;

/// The volume has an owner that is connected, or whose lease runs (traps T8, T25).
pub const OWNED: Status = Status(0x701);
/// The generation of the command is not higher than the one on record, or the owner was fenced
/// (trap T8).
pub const STALE_GENERATION: Status = Status(0x702);
/// Only the owner of the volume may send the command, and this association is not the owner.
pub const NOT_OWNER: Status = Status(0x703);
/// The volume's log holds entries that have not been recovered (trap T19).
pub const UNRECOVERED: Status = Status(0x704);
/// The stream's log partition is full, because the initiator has sent more than its credits allow
/// (trap T13).
pub const LOG_FULL: Status = Status(0x705);
/// The target has no ordering log, or none for this volume.
pub const NO_LOG: Status = Status(0x706);
/// The stream has failed earlier, so no later request of the stream is carried out (trap T22,
/// promise P6).
pub const POISONED: Status = Status(0x707);
/// The attribute of an ordered request is not valid (trap T18).
pub const BAD_ATTRIBUTE: Status = Status(0x708);
/// The stream is bound to another connection, or operations in flight have not come back yet.
pub const STREAM_BUSY: Status = Status(0x709);
/// A plain write is refused, because the namespace is a member of a volume that has an owner or a
/// log to recover (trap T21).
pub const GUARDED: Status = Status(0x70a);
/// The log region has not enough space for the volume's partitions. Dword 0 of the completion is
/// the number of bytes needed, dword 1 the number of bytes free.
pub const LOG_TOO_SMALL: Status = Status(0x70b);
/// The target does not know this volume.
pub const UNKNOWN_VOLUME: Status = Status(0x70c);
/// The volume exists already.
pub const VOLUME_EXISTS: Status = Status(0x70d);
/// The volume has no such stream.
pub const NO_SUCH_STREAM: Status = Status(0x70e);
/// An ordered request was sent on a queue that is bound to no stream.
pub const NOT_BOUND: Status = Status(0x70f);
/// The log belongs to another boot of the target and is not valid (trap T19).
pub const LOG_LOST: Status = Status(0x710);
/// The log store itself failed.
pub const LOG_FAILED: Status = Status(0x711);
/// The stream's in-place list has not been acknowledged (trap T9).
pub const IN_PLACE_PENDING: Status = Status(0x712);
/// The partition was settled at another group.
pub const SETTLED: Status = Status(0x713);
/// An owner has come back after its lease has run out. The volume was free for others since (trap
/// T25).
pub const LEASE_OVER: Status = Status(0x714);
/// A claim requests a longer lease than the target grants. Dword 0 of the completion is the longest
/// lease, milliseconds (trap T28).
pub const LEASE_TOO_LONG: Status = Status(0x715);
/// The target can't keep as many more log slots as the volume needs. Dword 0 of the completion is
/// the most slots per stream that a volume with so many streams can get now (trap T28).
pub const TOO_MANY_SLOTS: Status = Status(0x716);
/// The directory of the log has no free record. Dword 0 of the completion is the number of volumes
/// that the directory can hold.
pub const LOG_DIRECTORY_FULL: Status = Status(0x717);
/// Hosts use all streams that the target has on a drive which keeps their order (trap T28).
pub const DRIVE_STREAMS_FULL: Status = Status(0x718);

/// The file or the device under a drive is gone. The code is vendor specific, of the type of media
/// errors (2h), so that a peer that does not know it takes it for a failure of the drive.
pub const DRIVE_GONE: Status = Status(0x2c0);

/// The text of a status, also of Rio's own codes, for error messages.
#[must_use]
pub fn text(status: Status) -> String {
    meaning(status).map_or_else(|| status.to_string(), String::from)
}

/// The meaning of a vendor status, for error messages.
#[must_use]
pub fn meaning(status: Status) -> Option<&'static str> {
    Some(match Status(status.0 & 0x7ff) {
        OWNED => "the volume has an owner that is connected, or may still come back",
        STALE_GENERATION => "a newer owner has taken the volume over",
        NOT_OWNER => "this initiator does not own the volume",
        UNRECOVERED => "the volume's log has not been recovered",
        LOG_FULL => "the stream's ordering log is full",
        NO_LOG => "the target has no ordering log for this volume",
        POISONED => "the stream has failed earlier",
        BAD_ATTRIBUTE => "the ordering attribute is not valid, or is of a later version",
        STREAM_BUSY => {
            "the stream is bound to another connection, or operations in flight have not come back yet"
        }
        GUARDED => "the namespace belongs to a Rio volume that is owned or unrecovered",
        LOG_TOO_SMALL => {
            "the target's log region has no space for this volume: replace another volume of that \
             target, or give the target a larger log once no volume needs the present one"
        }
        UNKNOWN_VOLUME => "the target does not know this volume",
        VOLUME_EXISTS => "the volume exists already on this target",
        NO_SUCH_STREAM => "the volume has no such stream",
        NOT_BOUND => "the queue is bound to no stream",
        LOG_LOST => {
            "the log is from another boot of the target, or older than it was, and is not valid"
        }
        LOG_FAILED => "the target's log store failed",
        IN_PLACE_PENDING => "the stream's list of in-place updates has not been acknowledged",
        SETTLED => "an earlier recovery has settled the stream at another group",
        LEASE_OVER => "the owner's lease is over, and the volume was free since: open it again",
        LEASE_TOO_LONG => {
            "the claim asks for a longer lease than the target grants, which is a day"
        }
        TOO_MANY_SLOTS => {
            "the volume needs more log slots than the target keeps in memory beside those of its \
             other volumes: use fewer streams or slots"
        }
        DRIVE_STREAMS_FULL => "hosts use all streams of the drive",
        LOG_DIRECTORY_FULL => {
            "the target's log region holds as many volumes as it can: replace one of that target \
             that is not needed, or give the target another log once no volume needs the present one"
        }
        DRIVE_GONE => {
            "the drive is gone: its file was deleted, replaced or cut short while it was served, or \
             its device was removed; the target's log names it"
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    #[test]
    fn every_vendor_status_means_something_else() {
        let meanings: Vec<_> = (0x701..=0x718).map(|s| meaning(Status(s))).collect();
        for (i, text) in meanings.iter().enumerate() {
            assert!(text.is_some() && !meanings[..i].contains(text), "{text:?}");
        }
        let found = meaning(OWNED.with_dnr());
        assert_eq!(found, meanings[0], "with DNR and without");
        assert!(meaning(DRIVE_GONE.with_dnr()).is_some_and(|text| text.contains("deleted")));
        assert_eq!(DRIVE_GONE.sct(), Status::SCT_MEDIA);
        for other in [0x700, 0x719, 0x001, 0x280, 0x2c1] {
            assert_eq!(meaning(Status(other)), None);
        }
    }
}
