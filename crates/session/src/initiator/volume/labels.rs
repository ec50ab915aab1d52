//! Commands that read and write the labels of a volume's drives.

use alloc::vec::Vec;
use core::ops::Range;

use riopipe_nvme::command::Sqe;

use super::calls::{Associations, Targets};
use super::error::CallFailure;
use super::members::MemberPlace;
use crate::initiator::association::ControlQueue;
use crate::initiator::queue_pair::Data;
use crate::label::{DATA_START, LABEL_LEN};
use crate::label_work::LabelIo;
use crate::wire::BLOCK_BYTES;

/// Sends one step of reading or writing labels to its drive. The drives queue of its target must be
/// ready.
///
/// # Errors
/// The target, and the reason why the command could not be sent.
pub(super) fn send<A: Associations, Q>(
    targets: &mut Targets<Q>,
    associations: &mut A,
    places: &[MemberPlace],
    io: LabelIo,
    purpose: Q,
    now: u64,
) -> Result<(), (usize, CallFailure)> {
    let place = places[member_of(&io)];
    let to = (place.target, ControlQueue::Drives);
    let sent = match io {
        LabelIo::Read { .. } => {
            let (sqe, data) = (Sqe::read(place.nsid, 0, 2), Data::Read(2 * LABEL_LEN as u32));
            targets.ask(associations, to, sqe, data, purpose, now)
        }
        LabelIo::Flush { .. } => {
            targets.ask(associations, to, Sqe::flush(place.nsid), Data::None, purpose, now)
        }
        LabelIo::Write { lba, block, .. } => {
            let blocks = (block.len() / LABEL_LEN) as u32;
            let data = [A::Piece::from(block)];
            targets.ask(
                associations,
                to,
                Sqe::write(place.nsid, lba, blocks),
                Data::Write(&data),
                purpose,
                now,
            )
        }
    };
    sent.map_err(|source| (place.target, source))
}

/// Reads blocks of a drive. The drives queue of its target must be ready.
pub(super) fn read_blocks<A: Associations, Q>(
    targets: &mut Targets<Q>,
    associations: &mut A,
    place: MemberPlace,
    blocks: Range<u64>,
    purpose: Q,
    now: u64,
) -> Result<(), CallFailure> {
    let count = (blocks.end - blocks.start) as u32;
    let (sqe, data) =
        (Sqe::read(place.nsid, blocks.start, count), Data::Read(count * BLOCK_BYTES as u32));
    targets.ask(associations, (place.target, ControlQueue::Drives), sqe, data, purpose, now)
}

/// The blocks of both copies of a label.
pub(super) const COPIES: Range<u64> = 0..2;

/// The steps that zero these blocks of a member's drive and make that durable.
pub(super) fn zeroes(member: usize, ranges: &[Range<u64>]) -> Vec<LabelIo> {
    let write = |range: &Range<u64>| {
        let bytes = (range.end - range.start) as usize * BLOCK_BYTES;
        LabelIo::Write { member, lba: range.start, block: alloc::vec![0; bytes] }
    };
    let mut steps: Vec<LabelIo> = ranges.iter().map(write).collect();
    if !steps.is_empty() {
        steps.push(LabelIo::Flush { member });
    }
    steps
}

/// The member whose drive a step concerns.
pub(super) const fn member_of(io: &LabelIo) -> usize {
    match io {
        LabelIo::Read { member } | LabelIo::Flush { member } | LabelIo::Write { member, .. } => {
            *member
        }
    }
}

/// The name of a step's action, for error messages.
pub(super) const fn action_name(io: &LabelIo) -> &'static str {
    match io {
        LabelIo::Read { .. } => READING,
        LabelIo::Flush { .. } | LabelIo::Write { .. } => WRITING,
    }
}

pub(super) const READING: &str = "reading the label";
pub(super) const WRITING: &str = "writing the label";

/// The steps that give a drive its first label, in order. First, the first block of the data area,
/// behind the prepare area, is overwritten with zeroes, so that old data there is not taken for data of
/// the new volume. Then each copy of the label is written and made durable.
pub(super) fn first_labels(
    member: usize,
    prepare_blocks: u32,
    copies: [(u64, Vec<u8>); 2],
) -> [LabelIo; 6] {
    let flush = || LabelIo::Flush { member };
    let lba = DATA_START + u64::from(prepare_blocks);
    let blank = LabelIo::Write { member, lba, block: alloc::vec![0; LABEL_LEN] };
    let [first, second] = copies.map(|(lba, block)| LabelIo::Write { member, lba, block });
    [blank, flush(), first, flush(), second, flush()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_block_of_the_data_is_blank_behind_any_prepare_area() {
        for (prepare_blocks, expected) in [(0, DATA_START), (64, DATA_START + 64)] {
            let steps = first_labels(0, prepare_blocks, [(0, Vec::new()), (1, Vec::new())]);
            let LabelIo::Write { lba, block, .. } = &steps[0] else { panic!("{steps:?}") };
            assert_eq!((*lba, block.as_slice()), (expected, &[0; LABEL_LEN][..]));
        }
    }

    #[test]
    fn an_error_names_whether_a_label_was_read_or_written() {
        let write = LabelIo::Write { member: 0, lba: 0, block: Vec::new() };
        let steps = [LabelIo::Read { member: 0 }, write, LabelIo::Flush { member: 0 }];
        let names = steps.each_ref().map(action_name);
        assert_eq!(names, ["reading the label", "writing the label", "writing the label"]);
    }
}
