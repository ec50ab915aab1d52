//! How a volume opening reads and rewrites the labels of a volume (traps T19, T20, T24):
//!
//! 1. Read the labels of all members and check them ([`check_labels`]).
//! 2. Claim the volume on all targets.
//! 3. Rewrite the labels for the new owner ([`Relabel`]).
//! 4. Recover the volume.

use alloc::string::String;
use alloc::vec::Vec;

use riopipe_nvme::digest::Crc32c;
use riopipe_order::attribute::VolumeId;
use riopipe_order::probe::{self, Plant, Rare};

use crate::label::{AssembleError, Found, LABEL_LEN, Label, assemble, logs_due};

/// One operation on the label of a member. `member` is the number of the member in the volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LabelIo {
    /// Read both copies, blocks 0 and 1.
    Read {
        /// The member.
        member: usize,
    },
    /// Flush the drive.
    Flush {
        /// The member.
        member: usize,
    },
    /// Write one copy, or other blocks.
    Write {
        /// The member.
        member: usize,
        /// The first block to write. A copy is block 0 or 1.
        lba: u64,
        /// The content of the block, [`LABEL_LEN`] bytes, or of several blocks.
        block: Vec<u8>,
    },
}

/// A drive with its label. `nguid` is the NGUID of the drive's namespace, and `region` is the id of
/// the log region of the drive's target. `copies` are the bytes of both copies of the label, as
/// they were read.
#[must_use]
pub fn found(nguid: [u8; 16], region: Option<[u8; 16]>, copies: &[u8], crc32c: Crc32c) -> Found {
    let (first, second) = copies.split_at(copies.len().min(LABEL_LEN));
    Found { nguid, region, label: Label::newest([first, second], crc32c) }
}

/// Checks by their labels that these drives form a volume that may be opened. Returns the label of
/// member 0. `name` is the name of the volume that the caller requests, if there is one. With
/// `accept_lost_log`, a target may have another log than the one that the labels name.
///
/// # Errors
/// The first error found.
pub fn check_labels(
    name: Option<&str>,
    found: &[Found],
    accept_lost_log: bool,
) -> Result<Label, AssembleError> {
    let head = assemble(name, found).inspect_err(|_| probe::count_rare(Rare::DrivesRefused))?;
    if !accept_lost_log && !probe::is_bug_planted(Plant::T19BlankLog) {
        logs_due(found)?;
    }
    Ok(head)
}

/// The largest generation on any label. No log of the volume may have a lower one (trap T24).
#[must_use]
pub fn max_generation(labels: &[Label]) -> u32 {
    labels.iter().map(|label| label.generation).max().unwrap_or(0)
}

/// A change of a volume that only its labels record. An owner makes it as it opens the volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LabelEdit {
    /// The new name of the volume; `None`: it stays.
    pub name: Option<String>,
    /// The new number of blocks of each member's data area; `None`: it stays. It must not be
    /// smaller than before.
    pub data_blocks: Option<u64>,
}

/// The number of steps after the reads for each member: write the newer copy again, FLUSH, write
/// the new label over the older copy, FLUSH.
const STEPS_PER_MEMBER: usize = 4;

/// Rewrites a volume's labels for the owner that has just claimed the volume.
///
/// ```text
/// read all labels again → check them → for each member:
///   write the newer copy again → FLUSH → write the new label over the older copy → FLUSH
/// ```
///
/// All labels are read again, because another initiator may have written them before the claim.
///
/// The newer copy must be durable before the older one is overwritten, because it may have been
/// read from a volatile cache: a power cut could then destroy both copies. A FLUSH alone is not
/// enough. It covers only completed writes, and the newer copy may come from a write that failed
/// (assumption M2). So the newer copy is written again. Its bytes are the same, so a torn write
/// does not change it.
#[derive(Debug)]
pub struct Relabel {
    /// The name that all labels must have.
    name: String,
    /// The volume's id that all labels must have.
    volume: VolumeId,
    /// The NGUID of each member's namespace.
    nguids: Vec<[u8; 16]>,
    /// The generation of the new owner.
    generation: u32,
    /// For each member, the id of the log region that the new label names; `None` if all labels
    /// keep their log regions.
    regions: Option<Vec<[u8; 16]>>,
    /// The change of the volume.
    edit: LabelEdit,
    crc32c: Crc32c,
    /// The labels that have been read again, until they are checked.
    found: Vec<Found>,
    /// Both copies of each member's label, as they were read.
    copies: Vec<Vec<u8>>,
    /// The labels to write; empty until the old ones have been checked.
    new_labels: Vec<Label>,
    /// How many steps are done. The steps are one read for each member, and then
    /// [`STEPS_PER_MEMBER`] for each member.
    done_step_count: usize,
}

impl Relabel {
    /// The rewriting of the labels of one volume. `head` is the label of member 0 before the claim,
    /// `nguids` are the NGUIDs of the members' namespaces, and `generation` is the one of the new
    /// owner. If logs may be given up, `regions` are the log regions that the members' targets have
    /// now, and the new labels name them. `edit` is a change of the volume.
    #[must_use]
    pub fn new(
        head: &Label,
        nguids: Vec<[u8; 16]>,
        generation: u32,
        regions: Option<Vec<[u8; 16]>>,
        edit: LabelEdit,
        crc32c: Crc32c,
    ) -> Self {
        Self {
            edit,
            name: head.name.clone(),
            volume: head.volume,
            nguids,
            generation,
            regions,
            crc32c,
            found: Vec::new(),
            copies: Vec::new(),
            new_labels: Vec::new(),
            done_step_count: 0,
        }
    }

    /// The operation of the next step; `None` if all steps are done.
    #[must_use]
    pub fn next_step(&self) -> Option<LabelIo> {
        let Some(step_after_reads) = self.done_step_count.checked_sub(self.nguids.len()) else {
            return Some(LabelIo::Read { member: self.done_step_count });
        };
        let member = step_after_reads / STEPS_PER_MEMBER;
        let label = self.new_labels.get(member)?;
        let older_lba = Label::block_of(label.sequence);
        let newer_lba = 1 - older_lba;
        Some(match step_after_reads % STEPS_PER_MEMBER {
            0 => {
                let block = self.copy_as_read(member, newer_lba);
                LabelIo::Write { member, lba: newer_lba, block }
            }
            2 => LabelIo::Write { member, lba: older_lba, block: label.encode(self.crc32c) },
            _ => LabelIo::Flush { member },
        })
    }

    /// The copy of a member's label in block `lba`, as it was read.
    fn copy_as_read(&self, member: usize, lba: u64) -> Vec<u8> {
        self.copies[member].chunks(LABEL_LEN).nth(lba as usize).unwrap_or_default().to_vec()
    }

    /// Notes that the next step is done. `read` are the bytes that were read, if the step was a
    /// read. After the last read, checks the labels.
    ///
    /// # Errors
    /// The labels that were read are not those of the volume that was claimed.
    pub fn on_step_done(&mut self, read: &[u8]) -> Result<(), AssembleError> {
        let member_count = self.nguids.len();
        if self.done_step_count < member_count {
            let nguid = self.nguids[self.done_step_count];
            self.found.push(found(nguid, None, read, self.crc32c));
            self.copies.push(read.to_vec());
        }
        self.done_step_count += 1;
        if self.done_step_count == member_count {
            self.check_and_renew()?;
        }
        Ok(())
    }

    /// Checks the labels that have been read again, and makes the new labels from them.
    fn check_and_renew(&mut self) -> Result<(), AssembleError> {
        let head = assemble(Some(&self.name), &self.found)?;
        if head.volume != self.volume {
            let (name, volume) = (head.name, head.volume);
            return Err(AssembleError::Foreign { given: 0, name, volume });
        }
        let found = core::mem::take(&mut self.found);
        let old_labels = found.into_iter().filter_map(|drive| drive.label.ok());
        for (member, label) in old_labels.enumerate() {
            let region = self.regions.as_ref().map(|regions| regions[member]);
            let mut renewed = label.for_owner(self.generation, region);
            // An interrupted change of the name may have left an older one on this label.
            renewed.name.clone_from(self.edit.name.as_ref().unwrap_or(&head.name));
            renewed.data_blocks = self.edit.data_blocks.unwrap_or(renewed.data_blocks);
            self.new_labels.push(renewed);
        }
        Ok(())
    }

    /// The new labels, in the order of the members; empty if the old ones have not been read.
    #[must_use]
    pub fn into_labels(self) -> Vec<Label> {
        self.new_labels
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::label::tests::crc;
    use alloc::vec;

    /// The label of a drive of a volume of two.
    fn label(index: u16, sequence: u32) -> Label {
        let mut label = crate::label::tests::label(index);
        label.members.truncate(2);
        Label { generation: sequence, sequence, ..label }
    }

    fn copies(index: u16, sequence: u32) -> Vec<u8> {
        let mut bytes = vec![0; 2 * LABEL_LEN];
        for sequence in [sequence - 1, sequence] {
            let at = Label::block_of(sequence) as usize * LABEL_LEN;
            bytes[at..at + LABEL_LEN].copy_from_slice(&label(index, sequence).encode(crc));
        }
        bytes
    }

    fn relabel(regions: Option<Vec<[u8; 16]>>) -> Relabel {
        Relabel::new(&label(0, 4), vec![[0; 16], [1; 16]], 7, regions, LabelEdit::default(), crc)
    }

    #[test]
    fn t24_labels_are_read_again_and_the_copy_that_stays_is_durable_first() {
        let mut work = relabel(None);
        for member in 0..2 {
            assert_eq!(work.next_step(), Some(LabelIo::Read { member }));
            work.on_step_done(&copies(member as u16, 4 + member as u32)).unwrap();
        }
        for member in 0..2 {
            let next = label(member as u16, 4 + member as u32).for_owner(7, None);
            let (lba, block) = (Label::block_of(next.sequence), next.encode(crc));
            let stays = label(member as u16, 4 + member as u32).encode(crc);
            for io in [
                LabelIo::Write { member, lba: 1 - lba, block: stays },
                LabelIo::Flush { member },
                LabelIo::Write { member, lba, block },
                LabelIo::Flush { member },
            ] {
                assert_eq!(work.next_step(), Some(io));
                work.on_step_done(&[]).unwrap();
            }
        }
        assert_eq!(work.next_step(), None);
        let labels = work.into_labels();
        assert_eq!(labels.iter().map(|l| l.sequence).collect::<Vec<_>>(), [5, 6]);
        assert_eq!(max_generation(&labels), 7);
    }

    #[test]
    fn t24_a_torn_copy_leaves_the_other() {
        let mut torn = copies(0, 5);
        torn[LABEL_LEN + 200] ^= 1;
        let found = found([0; 16], None, &torn, crc);
        assert_eq!(found.label.map(|l| l.sequence), Ok(4));
    }

    #[test]
    fn t20_an_owner_from_before_the_claim_is_noticed() {
        let mut work = relabel(None);
        work.on_step_done(&copies(0, 4)).unwrap();
        let mut other = label(1, 4);
        other.volume = VolumeId([8; 16]);
        let mut bytes = other.encode(crc);
        bytes.resize(2 * LABEL_LEN, 0);
        assert!(matches!(work.on_step_done(&bytes), Err(AssembleError::Foreign { .. })));
    }

    #[test]
    fn t19_the_log_that_is_due_is_judged_and_given_up_on_demand() {
        let there = |region: u8| {
            let found = |i: u16| found([i as u8; 16], Some([region; 16]), &copies(i, 4), crc);
            [found(0), found(1)]
        };
        let error = check_labels(Some("logs"), &there(100), false).unwrap_err();
        assert!(matches!(error, AssembleError::LogDue { given: 1, .. }), "{error}");
        assert!(check_labels(Some("logs"), &there(100), true).is_ok());
        let mut work = relabel(Some(vec![[100; 16], [55; 16]]));
        for member in 0..2 {
            work.on_step_done(&copies(member, 4)).unwrap();
        }
        assert_eq!(work.into_labels()[1].members[1].region, [55; 16]);
    }
}
