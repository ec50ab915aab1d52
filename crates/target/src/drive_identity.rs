//! The identities of a target's drives: gathering what is known of them, and storing what was
//! decided. The decisions are in [`riopipe_session::drive_identity`].

use std::io;

use riopipe_media::{Attribute, Carrier, Drive, Physical, file_to_create, open_drive};
use riopipe_order::attribute::Member;
use riopipe_order::log_region::MemberNamespace;
use riopipe_platform::crc32c;
use riopipe_session::drive_identity::{
    AdoptError, Choice, DriveId, Facts, Origin, Place, RECORD_BLOCK, Record, RecordError, Reserved,
    adopt, choose, distinguish,
};
use riopipe_session::label::{LABEL_LEN, Label};
use riopipe_session::target::LabelledDrive;
use uuid::Uuid;

use crate::checked_config::CheckedNamespace;
use crate::log::random_id;

/// The blocks at the start of a drive that have its label and its identity.
const HEAD_BLOCKS: usize = RECORD_BLOCK as usize + 1;

/// The reason why a drive has no identity under which it could be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IdentityError {
    /// The stored identity can't be used (trap T19).
    #[error("{0}: adopt the identity of its label, or give the drive a UUID in the configuration")]
    Record(#[from] RecordError),
    /// Another drive of the target has the same identity.
    #[error(
        "the drive has the identity of namespace {nsid}: one is a copy of the other, or both have \
         the same uuid or nguid in the configuration; serve one of them only, or give one another \
         uuid"
    )]
    SameAs {
        /// The namespace with the other drive.
        nsid: u32,
    },
    /// The drive has no identity to adopt, or no place for one.
    #[error(transparent)]
    Adopt(#[from] AdoptError),
    /// The drive can't be opened.
    #[error(transparent)]
    Open(#[from] riopipe_media::OpenError),
    /// The stored identity can't be read.
    #[error("the drive's identity can't be read: {0}")]
    Read(#[source] io::Error),
    /// The file does not exist, or is empty.
    #[error("the file {path} does not exist, or is empty")]
    Missing {
        /// Its path.
        path: String,
    },
    /// The identity was stored, and the drive has another one even so.
    #[error(
        "the drive did not get the NGUID {wanted} of its label: it has {found}; give its namespace \
         nguid = \"{wanted}\" in the configuration"
    )]
    NotAdopted {
        /// The NGUID that the drive was to adopt, 32 hexadecimal digits.
        wanted: String,
        /// The NGUID that it has.
        found: String,
    },
    /// The identity can't be stored.
    #[error("the drive's identity can't be stored with it: {0}")]
    Store(#[source] io::Error),
}

/// The identity of a drive, for display.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShownIdentity {
    /// The NGUID, 32 hexadecimal digits.
    pub nguid: String,
    /// The UUID.
    pub uuid: String,
    /// Where the identity comes from.
    pub origin: Origin,
}

impl From<&Choice> for ShownIdentity {
    fn from(choice: &Choice) -> Self {
        let nguid = Uuid::from_bytes(choice.id.nguid).simple().to_string();
        let uuid = Uuid::from_bytes(choice.id.uuid).to_string();
        Self { nguid, uuid, origin: choice.origin }
    }
}

/// The facts about one drive.
pub(crate) struct Known {
    facts: Facts,
    /// The member that the label names the drive as, if the label is this drive's own.
    label: Option<Label>,
}

/// Reads what is known of the identity of a drive, at this position. Changes nothing.
pub(crate) fn inspect(drive: &dyn Drive, position: DriveId) -> Result<Known, IdentityError> {
    let mut facts = Facts {
        attribute: None,
        takes_attribute: false,
        labelled: None,
        reserved: None,
        place: None,
        device: None,
        position,
        has_content: false,
        random: random_id(),
    };
    let Some(carrier) = drive.carrier() else { return Ok(Known { facts, label: None }) };
    match carrier.physical().map_err(IdentityError::Read)? {
        Physical::File { inode, birth_ns, file_system } => {
            facts.place = Some(Place::of_file(inode, birth_ns, file_system));
            facts.has_content = carrier.has_content();
            let attribute = carrier.attribute().map_err(IdentityError::Read)?;
            facts.takes_attribute = attribute != Attribute::Unsupported;
            if let Attribute::Content(content) = attribute {
                facts.attribute = Some(content);
            }
        }
        Physical::Device(identifier) => {
            facts.place = Some(Place::of_device(&identifier));
            facts.device = Some(DriveId::of_device(&identifier));
        }
        Physical::Nameless => {}
    }
    // A drive that is too small, or can't be read there, has no label.
    let head = carrier.read(0, HEAD_BLOCKS).ok();
    let copies = head.as_ref().map(|head| [&head[..LABEL_LEN], &head[LABEL_LEN..2 * LABEL_LEN]]);
    facts.reserved = head.as_ref().and_then(|head| Reserved::find(head, crc32c));
    let label = copies.and_then(|copies| Label::newest(copies, crc32c).ok());
    let own = label.as_ref().and_then(|label| label.members.get(usize::from(label.index)));
    facts.labelled = own.map(|own| own.nguid);
    Ok(Known { facts, label })
}

/// The identity that a drive gets at this namespace, with what the configuration gives of it.
pub(crate) fn choose_for(
    known: &Known,
    namespace: &CheckedNamespace,
) -> Result<Choice, IdentityError> {
    let configured =
        Choice { id: namespace.id, origin: Origin::Configured, store: None, otherwise: None };
    if namespace.has_uuid {
        return Ok(configured);
    }
    let own = choose(&known.facts, crc32c)?;
    if namespace.has_nguid {
        let id = DriveId { nguid: namespace.id.nguid, uuid: own.id.uuid };
        return Ok(Choice { id, ..Choice { store: own.store, ..configured } });
    }
    Ok(own)
}

/// The identities of all drives of a target, in the order of the namespaces, stored with the drives.
pub(crate) fn identify(
    drives: &[(&CheckedNamespace, &dyn Drive)],
) -> Result<Vec<(Choice, Known)>, (u32, IdentityError)> {
    let mut found = Vec::new();
    for (namespace, drive) in drives {
        let failed = |error| (namespace.nsid, error);
        let mut known = inspect(*drive, namespace.id).map_err(failed)?;
        let mut choice = choose_for(&known, namespace).map_err(failed)?;
        if choice.origin == Origin::New && !store(*drive, &known, choice.store).map_err(failed)? {
            known.facts.takes_attribute = false;
            choice = choose_for(&known, namespace).map_err(failed)?;
        }
        found.push((choice, known));
    }
    let mut choices: Vec<Choice> = found.iter().map(|(choice, _)| *choice).collect();
    distinguish(&mut choices).map_err(|(first, second)| {
        (drives[second].0.nsid, IdentityError::SameAs { nsid: drives[first].0.nsid })
    })?;
    for (((namespace, drive), (old, known)), mut choice) in
        drives.iter().zip(&mut found).zip(choices)
    {
        // A new identity is stored already, unless it had to give way.
        if choice.origin != Origin::New || choice != *old {
            let is_stored =
                store(*drive, known, choice.store).map_err(|error| (namespace.nsid, error))?;
            if !is_stored && choice.origin == Origin::TakenOver {
                choice.origin = Origin::Position;
            }
        }
        *old = choice;
        report(namespace, *drive, choice.origin);
        if known.facts.attribute.is_none() && known.facts.has_ignored_record(crc32c) {
            tracing::warn!(
                nsid = namespace.nsid,
                drive = namespace.drive.as_str(),
                "the identity that is stored in block 2 of the drive is ignored: it is damaged, of \
                 a later version, or not the one that the drive's label names"
            );
        }
    }
    Ok(found)
}

/// Logs what an operator may have to know about the origin of an identity.
fn report(namespace: &CheckedNamespace, drive: &dyn Drive, origin: Origin) {
    let note = note(drive, origin);
    let (nsid, drive) = (namespace.nsid, namespace.drive.as_str());
    if let Some(note) = note {
        tracing::warn!(nsid, drive, "{note}");
    } else if origin == Origin::TakenOver {
        tracing::info!(
            nsid,
            drive,
            "the identity that the label names is now stored with the drive"
        );
    }
}

/// The remark about the origin of an identity, if an operator has to know it.
pub(crate) fn note(drive: &dyn Drive, origin: Origin) -> Option<&'static str> {
    match origin {
        Origin::Position if drive.carrier().is_some() => Some(
            "the file system can't store the drive's identity or is full, or the device reports no \
             unique one, or its reserved block has other content: the identity follows from NQN and \
             namespace id. To serve the drive elsewhere as a member of \
             its volume, give the namespace the nguid in the configuration",
        ),
        Origin::Elsewhere => Some(
            "the identity stored with the drive belongs to another file or device: this one is a \
             copy, and is served with an identity of its own. If it was moved here, and the \
             original is gone, let it adopt the identity before it is served: rio target identity \
             DRIVE --adopt (or give the namespace the nguid of the original in the configuration)",
        ),
        _ => None,
    }
}

/// Stores a record with the drive, wherever it can be stored. Returns whether anything was stored,
/// or nothing had to be.
fn store(drive: &dyn Drive, known: &Known, record: Option<Record>) -> Result<bool, IdentityError> {
    let (Some(record), Some(carrier)) = (record, drive.carrier()) else { return Ok(true) };
    let bytes = record.encode(crc32c);
    let mut is_stored = false;
    if known.facts.takes_attribute {
        is_stored = carrier.set_attribute(&bytes).map_err(IdentityError::Store)?;
        if !is_stored {
            tracing::warn!(
                "the identity of a drive can't be stored in an attribute of its file: the file \
                 system has no space, or no such attributes"
            );
        }
    }
    if known.facts.takes_in_block(&record) {
        match write_record(carrier, &bytes) {
            Ok(()) => is_stored = true,
            // The block of a sparse file has no space yet.
            Err(error) if is_out_of_space(&error) => tracing::warn!(
                "the identity of a drive can't be stored in its reserved block: {error}"
            ),
            Err(error) => return Err(IdentityError::Store(error)),
        }
    }
    Ok(is_stored)
}

fn is_out_of_space(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

fn write_record(carrier: Carrier<'_>, bytes: &[u8]) -> io::Result<()> {
    carrier.write_block(RECORD_BLOCK, bytes)
}

impl Known {
    /// The member of a volume that the drive is, by its label.
    pub(crate) fn member(&self, id: DriveId, nsid: u32) -> Option<LabelledDrive> {
        let label = self.label.as_ref()?;
        let own = label.members.get(usize::from(label.index))?;
        let member = Member(u8::try_from(label.index).ok()?);
        let place = MemberNamespace { member, nsid };
        Some(LabelledDrive { volume: label.volume, place, is_own: own.nguid == id.nguid })
    }
}

/// The identity of the drive that `spec` names, as a target would serve it that gives it none by
/// its configuration. With `adopt`, the drive first adopts the identity that it carries: that of
/// its label, else the one that is stored with it.
///
/// `None` if the drive has no identity of its own: it gets one when it is served, or has the one of
/// its position.
///
/// # Errors
/// [`IdentityError`]: the drive can't be opened, or has nothing to adopt.
pub fn drive_identity(spec: &str, adopts: bool) -> Result<Option<ShownIdentity>, IdentityError> {
    if let Some(file) = file_to_create(spec) {
        return Err(IdentityError::Missing { path: file.path().to_owned() });
    }
    let drive = open_drive(spec)?;
    let position = DriveId { nguid: [0; 16], uuid: [0; 16] };
    let mut known = inspect(drive.as_ref(), position)?;
    if adopts {
        let record = adopt(&known.facts, crc32c)?;
        if !store(drive.as_ref(), &known, Some(record))? {
            return Err(AdoptError::NoStore.into());
        }
        known = inspect(drive.as_ref(), position)?;
        let found = choose(&known.facts, crc32c)?.id.nguid;
        if found != record.id.nguid {
            let digits = |nguid| Uuid::from_bytes(nguid).simple().to_string();
            let (wanted, found) = (digits(record.id.nguid), digits(found));
            return Err(IdentityError::NotAdopted { wanted, found });
        }
    }
    let choice = choose(&known.facts, crc32c)?;
    let has_own = !matches!(choice.origin, Origin::New | Origin::Position);
    Ok(has_own.then(|| ShownIdentity::from(&choice)))
}
