//! The limit of this process that a failure comes from, for its hint.

use std::io;

use riopipe::Exhausted;
use riopipe_platform::descriptors_max;

use crate::failure::Failure;

/// The system's number of the error that this process has too many descriptors open (`EMFILE`).
const TOO_MANY_OPEN: i32 = 24;

/// Adds the limit, and how to raise it, to a failure that comes from it. Not every error keeps the
/// system's one as a value, but each keeps its text.
pub(crate) fn with_limits(mut failure: Failure) -> Failure {
    let texts = [
        io::Error::from_raw_os_error(TOO_MANY_OPEN).to_string(),
        Exhausted::Descriptors.to_string(),
    ];
    if texts.iter().any(|text| failure.message.contains(text))
        && let Some(most) = descriptors_max()
    {
        failure.hint = Some(format!(
            "this process may have {most} descriptors open (RLIMIT_NOFILE): allow more, with \
             `ulimit -n` or LimitNOFILE= of its unit"
        ));
    }
    failure
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Code;

    #[test]
    fn a_failure_without_descriptors_names_the_limit() {
        let error = io::Error::from_raw_os_error(TOO_MANY_OPEN);
        for message in [format!("d: can't open it: {error}"), Exhausted::Descriptors.to_string()] {
            let failure = with_limits(Failure::new(Code::Failed, message).hint("another"));
            assert!(failure.hint.unwrap().contains("RLIMIT_NOFILE"));
        }
        let other = Failure::new(Code::Failed, "d: no such file");
        assert_eq!(with_limits(other.clone()), other);
    }
}
