//! The fields with which a command takes part in the order that a drive itself keeps, and the
//! record by which a target states that the drive of a namespace keeps such an order.
//!
//! Published for OPIMQ (FAST '25): two stream ids and two epoch ids in CDW2–3, and a barrier bit in
//! CDW12. A drive with a cache barrier has one sequence of epochs. Its writes name the stream
//! [`SEQUENCE`] instead of an id, so that no drive takes one kind of order for the other.

use riopipe_nvme::command::Sqe;
use riopipe_nvme::identify::NAMESPACE_VENDOR;
use riopipe_order::write_order::{DriveOrder, EpochId, EpochWrite, WriteOrder};

use super::u16_at;

/// The magic number of the record in Identify Namespace.
pub const NAMESPACE_MAGIC: [u8; 8] = *b"RIOORDER";
/// The offset of the record in Identify Namespace (its vendor area, bytes 384–4095).
pub const NAMESPACE_OFFSET: usize = NAMESPACE_VENDOR.start;

/// The barrier bit in CDW12.
const CDW12_BARRIER: u32 = 1 << 25;
/// The value in the place of a stream id that stands for the one sequence of epochs of a drive with
/// a cache barrier. No stream has this id.
pub const SEQUENCE: u16 = 0xffff;

/// Puts the place of a write in its drive's order into a Write.
///
/// | dword | bits | field |
/// |---|---|---|
/// | CDW2 | 15:0 | stream that writes; 0 if the write has no order; FFFFh for a drive with a cache barrier |
/// | CDW2 | 31:16 | stream that follows, 0 if none does |
/// | CDW3 | 15:0 | epoch of the first stream |
/// | CDW3 | 31:16 | epoch of the second stream |
/// | CDW12 | 25 | the write is the last one of its epoch |
#[inline]
pub fn put_order(sqe: &mut Sqe, order: WriteOrder) {
    let (streams, epochs, barrier) = match order {
        WriteOrder::Orderless => return,
        WriteOrder::Ordered { barrier } => (u32::from(SEQUENCE), 0, barrier),
        WriteOrder::Epochs(EpochWrite { own, follower, barrier }) => {
            let follower = follower.unwrap_or(EpochId { stream: 0, epoch: 0 });
            let pair = |own: u16, follower: u16| u32::from(own) | u32::from(follower) << 16;
            (pair(own.stream, follower.stream), pair(own.epoch, follower.epoch), barrier)
        }
    };
    sqe.set_dwords(2, streams, epochs);
    if barrier {
        sqe.set_dword(12, sqe.dword(12) | CDW12_BARRIER);
    }
}

/// Reads the place of a Write in its drive's order; `None` if the fields make no sense.
#[must_use]
#[inline]
pub fn order_of(sqe: &Sqe) -> Option<WriteOrder> {
    let (streams, epochs) = (sqe.dword(2), sqe.dword(3));
    let barrier = sqe.dword(12) & CDW12_BARRIER != 0;
    if streams == 0 {
        return (epochs == 0 && !barrier).then_some(WriteOrder::Orderless);
    }
    let id =
        |shift: u32| EpochId { stream: (streams >> shift) as u16, epoch: (epochs >> shift) as u16 };
    let (own, follower) = (id(0), id(16));
    if own.stream == SEQUENCE {
        let is_alone = follower.stream == 0 && epochs == 0;
        return is_alone.then_some(WriteOrder::Ordered { barrier });
    }
    let follower = match follower {
        EpochId { stream: 0, epoch: 0 } => None,
        EpochId { stream: 0 | SEQUENCE, .. } => return None,
        follower if follower.stream == own.stream => return None,
        follower => Some(follower),
    };
    (own.stream != 0).then_some(WriteOrder::Epochs(EpochWrite { own, follower, barrier }))
}

/// Turns a Flush into FLUSH(stream, epoch): all epochs of the stream before this one become
/// durable, also those that have not arrived yet. CDW2 15:0 has the stream, CDW3 15:0 the epoch.
pub fn put_flush_before(sqe: &mut Sqe, before: EpochId) {
    sqe.set_dwords(2, before.stream.into(), before.epoch.into());
}

/// The epoch of a FLUSH(stream, epoch); `Some(None)` for an ordinary Flush. `None` if the fields
/// make no sense.
#[must_use]
pub fn flush_before_of(sqe: &Sqe) -> Option<Option<EpochId>> {
    match (sqe.dword(2), sqe.dword(3)) {
        (0, 0) => Some(None),
        (stream @ 1..0xffff, epoch @ 0..=0xffff) => {
            Some(Some(EpochId { stream: stream as u16, epoch: epoch as u16 }))
        }
        _ => None,
    }
}

/// Writes the record of a drive's order into Identify Namespace data (4096 bytes). A drive without
/// an order has no record.
///
/// | byte | field |
/// |---|---|
/// | 0–7 | magic `RIOORDER` |
/// | 8–9 | 1: cache barrier; 2: epochs of streams |
pub fn put_drive_order(identify: &mut [u8], order: DriveOrder) {
    let code: u16 = match order {
        DriveOrder::None => return,
        DriveOrder::Barrier => 1,
        DriveOrder::Epochs => 2,
    };
    identify[NAMESPACE_OFFSET..NAMESPACE_OFFSET + 8].copy_from_slice(&NAMESPACE_MAGIC);
    identify[NAMESPACE_OFFSET + 8..NAMESPACE_OFFSET + 10].copy_from_slice(&code.to_le_bytes());
}

/// The order that the drive of a namespace keeps. It is none unless the target states one that this
/// version knows (trap T17).
#[must_use]
pub fn drive_order_of(identify: &[u8]) -> DriveOrder {
    match identify.get(NAMESPACE_OFFSET..NAMESPACE_OFFSET + 10) {
        Some(record) if record[..8] == NAMESPACE_MAGIC => match u16_at(record, 8) {
            1 => DriveOrder::Barrier,
            2 => DriveOrder::Epochs,
            _ => DriveOrder::None,
        },
        _ => DriveOrder::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_order_survives_the_wire_at_its_place() {
        let id = |stream, epoch| EpochId { stream, epoch };
        let own = id(0x1234, 0xfffe);
        let dual = EpochWrite { own, follower: Some(id(0x8001, 7)), barrier: true };
        let alone = EpochWrite { own, follower: None, barrier: false };
        let orders = [
            (WriteOrder::Orderless, [0, 0, 0]),
            (WriteOrder::Ordered { barrier: false }, [0xffff, 0, 0]),
            (WriteOrder::Ordered { barrier: true }, [0xffff, 0, 1 << 25]),
            (WriteOrder::Epochs(dual), [0x8001_1234, 0x0007_fffe, 1 << 25]),
            (WriteOrder::Epochs(alone), [0x1234, 0xfffe, 0]),
        ];
        for (order, dwords) in orders {
            let mut sqe = Sqe::write(3, 77, 9);
            put_order(&mut sqe, order);
            assert_eq!([sqe.dword(2), sqe.dword(3), sqe.dword(12) & !0xffff], dwords, "{order:?}");
            assert_eq!((sqe.slba(), sqe.nlb()), (77, 9));
            assert_eq!(order_of(&sqe), Some(order));
        }
    }

    #[test]
    fn t18_orders_that_make_no_sense_are_refused() {
        // A barrier or an epoch without a stream; a follower alone; a stream that follows itself; a
        // follower beside the one sequence, or as it; an epoch of no follower or of the sequence.
        let bad = [
            [0, 0, 1 << 25],
            [0, 1, 0],
            [0x0007_0000, 0, 0],
            [0x0007_0007, 0, 0],
            [0x0007_ffff, 0, 0],
            [0xffff_0007, 0, 0],
            [0x0007, 0x0001_0000, 0],
            [0xffff, 1, 0],
        ];
        for [streams, epochs, barrier] in bad {
            let mut sqe = Sqe::write(1, 0, 1);
            sqe.set_dwords(2, streams, epochs);
            sqe.set_dword(12, sqe.dword(12) | barrier);
            assert_eq!(order_of(&sqe), None, "{streams:x} {epochs:x} {barrier:x}");
        }
    }

    #[test]
    fn a_flush_names_a_stream_and_an_epoch_or_neither() {
        let mut sqe = Sqe::flush(1);
        assert_eq!(flush_before_of(&sqe), Some(None));
        let before = EpochId { stream: 0xfffe, epoch: 0xffff };
        put_flush_before(&mut sqe, before);
        assert_eq!(flush_before_of(&sqe), Some(Some(before)));
        for (stream, epoch) in [(0, 1), (0xffff, 0), (1, 0x1_0000), (0x1_0001, 0)] {
            sqe.set_dwords(2, stream, epoch);
            assert_eq!(flush_before_of(&sqe), None);
        }
    }

    #[test]
    fn the_order_of_a_drive_is_in_identify_namespace() {
        let mut page = [0; 4096];
        assert_eq!(drive_order_of(&page), DriveOrder::None);
        for order in [DriveOrder::None, DriveOrder::Barrier, DriveOrder::Epochs] {
            page = [0; 4096];
            put_drive_order(&mut page, order);
            assert_eq!(drive_order_of(&page), order);
        }
        page[NAMESPACE_OFFSET + 8] = 3;
        assert_eq!(drive_order_of(&page), DriveOrder::None, "an order of a later version (T17)");
        assert_eq!(drive_order_of(&page[..NAMESPACE_OFFSET + 9]), DriveOrder::None);
    }
}
