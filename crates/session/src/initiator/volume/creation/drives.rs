//! The drives of a new volume, and the reading of their labels and of their other content.

use alloc::vec::Vec;

use riopipe_nvme::digest::Crc32c;
use riopipe_order::attribute::VolumeId;

use super::super::calls::Associations;
use super::super::error::VolumeCreateError;
use super::super::labels;
use super::super::members::MemberPlace;
use super::foreign_content::{ContentProbe, ForeignContent};
use super::{Question, READING_CONTENT, VolumeCreation, failed_call};
use crate::initiator::attach::{Controller, Namespace};
use crate::label::{Label, LabelError};
use crate::label_work::LabelIo;

/// The drives, once their targets have reported them.
#[derive(Debug)]
pub(super) struct Drives {
    /// The controller of each target.
    pub(super) controllers: Vec<Controller>,
    /// The namespace of each member.
    pub(super) namespaces: Vec<Namespace>,
    /// The label of each member's drive.
    labels: Vec<DriveLabel>,
    /// The other content of each member's drive.
    contents: Vec<DriveContent>,
}

/// The content of a drive apart from its label, as far as it has been read.
#[derive(Clone, Debug)]
struct DriveContent {
    probe: ContentProbe,
    /// Whether a read has been sent and has no answer yet.
    is_requested: bool,
}

/// The label of a drive, as far as it has been read.
#[derive(Clone, Debug)]
enum DriveLabel {
    /// The read has not been sent.
    Unread,
    /// The read has been sent.
    Requested,
    /// The drive has a label, and so belongs to this volume.
    Volume(Label),
    /// The drive has a label that can't be read, so it may belong to a volume.
    Unreadable(LabelError),
    /// The drive has no label.
    None,
}

impl Drives {
    /// Drives of which nothing has been read. `places[i]` is the place of member `i`.
    pub(super) fn new(
        controllers: Vec<Controller>,
        namespaces: Vec<Namespace>,
        places: &[MemberPlace],
    ) -> Self {
        let labels = alloc::vec![DriveLabel::Unread; namespaces.len()];
        let content = |(namespace, place): (&Namespace, &MemberPlace)| {
            let max_bytes = controllers[place.target].mdts_bytes;
            DriveContent {
                probe: ContentProbe::new(namespace.blocks, max_bytes),
                is_requested: false,
            }
        };
        let contents = namespaces.iter().zip(places).map(content).collect();
        Self { controllers, namespaces, labels, contents }
    }

    /// Takes in the blocks of a member's drive that were read.
    pub(super) fn add_content(&mut self, member: usize, blocks: &[u8]) {
        let content = &mut self.contents[member];
        content.probe.add(blocks);
        content.is_requested = false;
    }

    /// The foreign content of a member's drive. On a drive with a label, this may be the label
    /// itself.
    pub(super) fn content(&self, member: usize) -> Option<ForeignContent> {
        self.contents[member].probe.content()
    }

    /// Whether the identity under which a member's drive is served is stored on it (`Some(true)`),
    /// or another one, or one that can't be used; `None` if there is none.
    pub(super) fn has_own_identity(&self, member: usize, crc32c: Crc32c) -> Option<bool> {
        let stored = self.contents[member].probe.identity(crc32c)?;
        Some(stored == Ok(self.namespaces[member].nguid))
    }

    /// Forgets all labels, so that they are read again.
    pub(super) fn clear_labels(&mut self) {
        self.labels.fill(DriveLabel::Unread);
    }

    /// Stores the label that was read from a member's drive.
    pub(super) fn set_label(&mut self, member: usize, label: Result<Label, LabelError>) {
        self.labels[member] = match label {
            Ok(label) => DriveLabel::Volume(label),
            Err(LabelError::Blank) => DriveLabel::None,
            Err(error) => DriveLabel::Unreadable(error),
        };
    }

    /// The label that was read from a member's drive, if there was one.
    pub(super) fn label(&self, member: usize) -> Option<&Label> {
        match self.labels.get(member) {
            Some(DriveLabel::Volume(label)) => Some(label),
            _ => None,
        }
    }

    /// The members whose drives have a label, and those labels.
    pub(super) fn labels(&self) -> impl Iterator<Item = (usize, &Label)> {
        (0..self.labels.len()).filter_map(|member| Some((member, self.label(member)?)))
    }

    /// The members whose drives have a label of `volume`, and those labels.
    pub(super) fn labels_of(&self, volume: VolumeId) -> impl Iterator<Item = (usize, &Label)> {
        self.labels().filter(move |(_, label)| label.volume == volume)
    }

    /// The first member whose drive has a label that can't be read, and the cause.
    pub(super) fn first_unreadable(&self) -> Option<(usize, LabelError)> {
        self.labels.iter().enumerate().find_map(|(member, label)| match label {
            DriveLabel::Unreadable(error) => Some((member, *error)),
            _ => None,
        })
    }

    /// Whether the labels of all members have been read.
    fn are_labels_read(&self) -> bool {
        let is_missing = |label| matches!(label, &DriveLabel::Unread | &DriveLabel::Requested);
        !self.labels.iter().any(is_missing)
    }
}

impl VolumeCreation {
    /// Reads the labels of all members. Returns whether all have been read.
    pub(super) fn read_labels(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<bool, VolumeCreateError> {
        let Some(drives) = &mut self.drives else { return Ok(false) };
        for (member, place) in self.config.places.iter().enumerate() {
            let is_due = matches!(drives.labels[member], DriveLabel::Unread);
            if !is_due || !self.targets.is_drives_queue_ready(associations, place.target) {
                continue;
            }
            labels::send(
                &mut self.targets,
                associations,
                &self.config.places,
                LabelIo::Read { member },
                Question::Label(member),
                now,
            )
            .map_err(|(target, source)| failed_call(target, labels::READING, source))?;
            drives.labels[member] = DriveLabel::Requested;
        }
        Ok(drives.are_labels_read())
    }

    /// Reads the first and the last blocks of all members. Returns whether all have been read.
    pub(super) fn read_content(
        &mut self,
        now: u64,
        associations: &mut impl Associations,
    ) -> Result<bool, VolumeCreateError> {
        let Some(drives) = &mut self.drives else { return Ok(false) };
        let mut are_all_read = true;
        for (member, place) in self.config.places.iter().enumerate() {
            let content = &mut drives.contents[member];
            let Some(blocks) = content.probe.next_read() else { continue };
            are_all_read = false;
            if content.is_requested
                || !self.targets.is_drives_queue_ready(associations, place.target)
            {
                continue;
            }
            labels::read_blocks(
                &mut self.targets,
                associations,
                *place,
                blocks,
                Question::Content(member),
                now,
            )
            .map_err(|source| failed_call(place.target, READING_CONTENT, source))?;
            content.is_requested = true;
        }
        Ok(are_all_read)
    }

    /// Checks that every drive without a label is unused, unless its content may be given up.
    pub(super) fn check_content_may_go(&self) -> Result<(), VolumeCreateError> {
        if self.config.force {
            return Ok(());
        }
        let Some(drives) = &self.drives else { return Ok(()) };
        let mut members = 0..self.config.places.len();
        let used = members.find_map(|member| Some((member, drives.content(member)?)));
        match used {
            Some((member, content)) => Err(VolumeCreateError::HoldsData { member, content }),
            None => Ok(()),
        }
    }

    /// The label that was read from a member's drive, if there was one.
    pub(super) fn present_label(&self, member: usize) -> Option<&Label> {
        self.drives.as_ref()?.label(member)
    }
}
