//! The check that no file or device is given twice: as two drives, or as a drive and the log. Without
//! it, the second one would wait for the lock of the first, and then blame another process.

use riopipe_media::{MediumPlace, place_of_drive, place_of_log};

use crate::check::Problem;
use crate::checked_config::CheckedNamespace;

/// The problem of each drive, and of the log, that is the same file or device as an earlier one,
/// also by a symbolic or a hard link. The first `open` drives are open already, and are not checked.
/// Errors in a specification are left to its opening.
pub(crate) fn same_media(
    namespaces: &[CheckedNamespace],
    open: usize,
    log: Option<&str>,
) -> Vec<Problem> {
    let drives = namespaces.iter().enumerate().skip(open).map(|(index, namespace)| {
        let place = format!("namespaces[{index}] (nsid {})", namespace.nsid);
        (place, namespace.drive.as_str(), place_of_drive(&namespace.drive))
    });
    let log = log.map(|spec| ("log".to_owned(), spec, place_of_log(spec)));
    let mut earlier: Vec<(String, &str, MediumPlace)> = Vec::new();
    let mut problems = Vec::new();
    for (place, spec, medium) in drives.chain(log) {
        let Ok(Some(medium)) = medium else { continue };
        match earlier.iter().find(|(_, _, other)| other.is_same(&medium)) {
            Some((other_place, other_spec, _)) => problems.push(Problem::new(
                place,
                format!("{spec} is the same file or device as {other_spec} of {other_place}"),
                "give each drive and the log its own",
            )),
            None => earlier.push((place, spec, medium)),
        }
    }
    problems
}
