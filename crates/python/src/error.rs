//! Exceptions: `riopipe.Error` and its subclasses, with the codes of the C interface.

use pyo3::prelude::*;
use riopipe_capi::{Failure, RIOP_BUSY, RIOP_CLOSED};

/// The exception of a failure.
pub(crate) fn raise(failure: impl Into<Failure>) -> PyErr {
    let Failure { code, is_retryable, can_reopen, members, text } = failure.into();
    Python::attach(|py| {
        // The classes are Python's (`_errors.py`): some of them have a second base.
        let made = py
            .import("riopipe._errors")
            .and_then(|errors| errors.getattr("make"))
            .and_then(|make| make.call1((code, text, is_retryable, can_reopen, members)));
        match made {
            Ok(error) => PyErr::from_value(error),
            Err(error) => error,
        }
    })
}

/// An object that was closed, or that a group has taken.
pub(crate) fn closed(text: &str) -> Failure {
    Failure::new(RIOP_CLOSED, text.to_owned())
}

/// Another thread is using the object.
pub(crate) fn busy(object: &str) -> Failure {
    Failure::retryable(RIOP_BUSY, format!("another thread is using the {object}"))
}
