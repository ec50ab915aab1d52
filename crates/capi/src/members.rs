//! The reasons of `RIOP_MEMBERS`: the members do not make the volume, and this module shows how.

use std::ffi::c_int;

use riopipe::cause::{AssembleError, LabelError};
use riopipe::{CreateError, DeleteError, OpenError};

use crate::error::{RiopError, guard_value};
use crate::handle;

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $number:literal;)*) => {
        $($(#[$doc])* pub const $name: c_int = $number;)*
    };
}

reasons! {
    /// The code is not `RIOP_MEMBERS`, or this version has no other reason for it.
    RIOP_MEMBERS_OTHER = 0;
    /// A drive has no label: it belongs to no volume.
    RIOP_MEMBERS_BLANK = 1;
    /// The drives are a volume with another name.
    RIOP_MEMBERS_NAME = 2;
    /// A drive belongs to another volume.
    RIOP_MEMBERS_FOREIGN = 3;
    /// The drives are those of the volume, in another order.
    RIOP_MEMBERS_ORDER = 4;
    /// There are too few drives or too many.
    RIOP_MEMBERS_COUNT = 5;
    /// A label can't be used: it is damaged, newer, a copy, or contradicts another.
    RIOP_MEMBERS_LABEL = 6;
    /// A target serves a drive with another ordering log than the one that is due.
    RIOP_MEMBERS_LOG = 7;
    /// A drive is given twice.
    RIOP_MEMBERS_TWICE = 8;
    /// Several volumes have the name.
    RIOP_MEMBERS_AMBIGUOUS = 9;
}

fn of_assembly(error: &AssembleError) -> c_int {
    match error {
        AssembleError::Label { error: LabelError::Blank, .. } => RIOP_MEMBERS_BLANK,
        AssembleError::Label { .. }
        | AssembleError::Copied { .. }
        | AssembleError::Contradiction { .. } => RIOP_MEMBERS_LABEL,
        AssembleError::OtherName { .. } => RIOP_MEMBERS_NAME,
        AssembleError::Foreign { .. } => RIOP_MEMBERS_FOREIGN,
        AssembleError::Order { .. } => RIOP_MEMBERS_ORDER,
        AssembleError::NoMembers | AssembleError::Count { .. } => RIOP_MEMBERS_COUNT,
        AssembleError::LogDue { .. } => RIOP_MEMBERS_LOG,
        _ => RIOP_MEMBERS_OTHER,
    }
}

pub(crate) fn of_open(error: &OpenError) -> c_int {
    match error {
        OpenError::Assemble { error, .. } => of_assembly(error),
        _ => RIOP_MEMBERS_OTHER,
    }
}

pub(crate) fn of_create(error: &CreateError) -> c_int {
    match error {
        CreateError::Twice(_) | CreateError::SameNguid(_) => RIOP_MEMBERS_TWICE,
        CreateError::ReadBack(error) => of_open(error),
        _ => RIOP_MEMBERS_OTHER,
    }
}

pub(crate) const fn of_delete(error: &DeleteError) -> c_int {
    match error {
        DeleteError::Ambiguous(_) => RIOP_MEMBERS_AMBIGUOUS,
        DeleteError::Missing { .. } => RIOP_MEMBERS_COUNT,
        DeleteError::Contradiction(_) => RIOP_MEMBERS_LABEL,
        _ => RIOP_MEMBERS_OTHER,
    }
}

/// Why the members do not make the volume.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_error_members(error: *const RiopError) -> c_int {
    // SAFETY: the caller keeps the rules.
    guard_value(RIOP_MEMBERS_OTHER, || Ok(unsafe { handle::shared(error) }?.members))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codes::RIOP_MEMBERS;
    use crate::failure::Failure;

    /// Errors with the same code have different reasons.
    #[test]
    fn each_reason_has_the_code_of_all() {
        let open = |error: AssembleError| {
            let failure = Failure::from(OpenError::Assemble { members: Vec::new(), error });
            assert_eq!(failure.code, RIOP_MEMBERS, "{}", failure.text);
            failure.members
        };
        let label = |error| AssembleError::Label { given: 0, error };
        let volume = riopipe::VolumeId([7; 16]);
        let (given, name) = (0, String::from("v"));
        let found = [
            open(label(LabelError::Blank)),
            open(AssembleError::OtherName { wanted: name.clone(), found: name.clone() }),
            open(AssembleError::Foreign { given, name, volume }),
            open(AssembleError::Order { given, is: 1 }),
            open(AssembleError::Count { needed: 2, given: 1 }),
            open(label(LabelError::Damaged)),
            open(AssembleError::LogDue { given, blank: true }),
        ];
        assert_eq!(found.to_vec(), (RIOP_MEMBERS_BLANK..=RIOP_MEMBERS_LOG).collect::<Vec<_>>());
        let twice = Failure::from(CreateError::Twice("127.0.0.1".parse().unwrap()));
        assert_eq!((twice.code, twice.members), (RIOP_MEMBERS, RIOP_MEMBERS_TWICE));
        let ambiguous = Failure::from(DeleteError::Ambiguous("v".into()));
        assert_eq!((ambiguous.code, ambiguous.members), (RIOP_MEMBERS, RIOP_MEMBERS_AMBIGUOUS));
    }
}
