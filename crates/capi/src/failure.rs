//! The codes and texts of the library's errors.

use std::any::Any;
use std::ffi::c_int;
use std::fmt::Display;

use riopipe::cause::{ConnectError, SessionError};
use riopipe::{
    AcknowledgeError, AttachError, BufError, CallError, ClaimError, CloseError, CreateError,
    DeleteError, Exhausted, FailureCause, ListError, OpenError, ParseMemberError, ReadError,
    RecoverError, ReopenError, SecretFileError, StreamError, StreamFailure, SubmitErrorKind,
    WaitError,
};

use crate::codes::*;
use crate::members::{self, RIOP_MEMBERS_OTHER};

/// Why a call failed, as C has it: the code and the text of an error of the library. Each error of [`riopipe`] becomes
/// one. Bindings of other languages use the same codes.
#[derive(Debug)]
pub struct Failure {
    /// The code: not `RIOP_OK`.
    pub code: c_int,
    /// Whether the same call may succeed later, if only time passes.
    pub is_retryable: bool,
    /// Whether the stream has failed, and may be reopened.
    pub can_reopen: bool,
    /// Why the members do not make the volume, if the code is [`RIOP_MEMBERS`]: see
    /// [`riop_error_members`](crate::riop_error_members).
    pub members: c_int,
    /// The text.
    pub text: String,
}

impl Failure {
    /// The failure of a call that fails again, until it is changed.
    #[must_use]
    pub fn new(code: c_int, text: String) -> Self {
        Self { code, is_retryable: false, can_reopen: false, members: RIOP_MEMBERS_OTHER, text }
    }

    /// The failure of a call that may succeed later.
    #[must_use]
    pub fn retryable(code: c_int, text: String) -> Self {
        Self { is_retryable: true, ..Self::new(code, text) }
    }

    fn of(code: c_int, is_retryable: bool, error: &impl Display) -> Self {
        Self { is_retryable, ..Self::new(code, error.to_string()) }
    }

    /// The failure of a call that has panicked.
    pub(crate) fn of_panic(panic: Box<dyn Any + Send>) -> Self {
        let text = match (panic.downcast_ref::<String>(), panic.downcast_ref::<&str>()) {
            (Some(text), _) => text.as_str(),
            (None, Some(text)) => text,
            (None, None) => "no text",
        };
        let text =
            format!("an error of the library (a panic): {text}; free the objects of the call");
        // The drop of the payload could panic again.
        std::mem::forget(panic);
        Self::new(RIOP_PANIC, text)
    }
}

fn call_code(error: &CallError) -> c_int {
    match error {
        CallError::Connect(_)
        | CallError::Broken(_)
        | CallError::Closed
        | CallError::Lost(_)
        | CallError::Unreachable(_)
        | CallError::TimedOut(_)
        | CallError::Silent(_)
        | CallError::Behind(_) => RIOP_UNREACHABLE,
        CallError::Session(
            SessionError::Authentication { .. } | SessionError::NotAuthenticated { .. },
        ) => RIOP_AUTHENTICATION,
        CallError::Session(_)
        | CallError::BringUp(_)
        | CallError::WhichSubsystem(_)
        | CallError::Nonsense(_) => RIOP_PROTOCOL,
        CallError::Status(_) => RIOP_REFUSED,
        CallError::Opening(_) => RIOP_RECOVERY,
        CallError::Exhausted(_) => RIOP_RESOURCES,
        _ => RIOP_OTHER,
    }
}

fn attach_code(error: &AttachError) -> c_int {
    match error {
        AttachError::Connect(ConnectError::Address { .. }) => RIOP_ADDRESS,
        AttachError::Connect(_) => RIOP_UNREACHABLE,
        AttachError::Target { source, .. } => call_code(source),
        AttachError::WhichSubsystem { .. } => RIOP_PROTOCOL,
        // The reasons may differ: the first one has the code, and the text has all.
        AttachError::Several(errors) => errors.first().map_or(RIOP_UNREACHABLE, attach_code),
        _ => RIOP_OTHER,
    }
}

fn claim_code(error: &ClaimError) -> c_int {
    match error {
        ClaimError::Owned { .. } => RIOP_OWNED,
        ClaimError::LogLost { .. }
        | ClaimError::LogDamaged { .. }
        | ClaimError::LogMissing { .. }
        | ClaimError::NoLog { .. }
        | ClaimError::LogGivenUp { .. }
        | ClaimError::LogBehind { .. }
        | ClaimError::Streams { .. }
        | ClaimError::Marks { .. } => RIOP_LOG,
        _ => RIOP_OTHER,
    }
}

fn recover_code(error: &RecoverError) -> c_int {
    match error {
        RecoverError::Attach(error) => attach_code(error),
        RecoverError::Unreachable { .. } | RecoverError::Lost { .. } => RIOP_UNREACHABLE,
        RecoverError::Call { source, .. } => call_code(source),
        _ => RIOP_RECOVERY,
    }
}

fn stream_code(error: &StreamError) -> c_int {
    match error {
        StreamError::NoSuchStream { .. } => RIOP_NOT_FOUND,
        StreamError::Open(_) => RIOP_STREAM_OPEN,
        StreamError::NoQueue { .. } | StreamError::Exhausted(_) => RIOP_RESOURCES,
        StreamError::Options(_) => RIOP_OPTION,
        StreamError::InPlacePending { .. } => RIOP_PENDING,
        StreamError::Recover(error) => recover_code(error),
        StreamError::Connect(_) => RIOP_UNREACHABLE,
        StreamError::Target { source, .. } => call_code(source),
        _ => RIOP_OTHER,
    }
}

fn open_code(error: &OpenError) -> c_int {
    match error {
        OpenError::Attach(error) => attach_code(error),
        OpenError::NoNamespace { .. } => RIOP_NOT_FOUND,
        OpenError::Shrunk { .. } => RIOP_DRIVE,
        OpenError::Name => RIOP_ARGUMENT,
        OpenError::Assemble { .. } | OpenError::Topology(_) => RIOP_MEMBERS,
        OpenError::Claim { error, .. } => claim_code(error),
        OpenError::Engine { .. } => RIOP_ENGINE,
        OpenError::Call { source, .. } => call_code(source),
        OpenError::Recover(error) => recover_code(error),
        OpenError::Exhausted(_) => RIOP_RESOURCES,
        _ => RIOP_OTHER,
    }
}

fn create_code(error: &CreateError) -> c_int {
    match error {
        CreateError::Attach(error) => attach_code(error),
        CreateError::Name => RIOP_ARGUMENT,
        CreateError::Options(_) | CreateError::PrepareAreaTooSmall { .. } => RIOP_OPTION,
        CreateError::ReadBack(error) => open_code(error),
        CreateError::Twice(_) | CreateError::SameNguid(_) | CreateError::Topology(_) => {
            RIOP_MEMBERS
        }
        CreateError::NoNamespace { .. } => RIOP_NOT_FOUND,
        CreateError::BlockSize { .. }
        | CreateError::TooSmall { .. }
        | CreateError::InUse { .. }
        | CreateError::UnreadableLabel { .. }
        | CreateError::HoldsData { .. } => RIOP_DRIVE,
        CreateError::Engine { .. } => RIOP_ENGINE,
        CreateError::LogTooSmall { .. }
        | CreateError::TooFewSlots { .. }
        | CreateError::LogDirectoryFull { .. }
        | CreateError::TooManySlots { .. } => RIOP_LOG,
        CreateError::Call { source, .. } => call_code(source),
        CreateError::Random(_) => RIOP_RESOURCES,
        CreateError::Owned { .. } => RIOP_OWNED,
        _ => RIOP_OTHER,
    }
}

fn list_code(error: &ListError) -> c_int {
    match error {
        ListError::Attach(error) => attach_code(error),
        ListError::Call { source, .. } => call_code(source),
        _ => RIOP_OTHER,
    }
}

/// The code of a failure of a target's part, which a reader reports.
fn cause_code(cause: &FailureCause) -> c_int {
    match cause {
        FailureCause::Disconnected(_) | FailureCause::TimedOut(_) => RIOP_UNREACHABLE,
        _ => RIOP_REFUSED,
    }
}

impl From<ParseMemberError> for Failure {
    fn from(error: ParseMemberError) -> Self {
        Self::of(RIOP_ADDRESS, false, &error)
    }
}

impl From<SecretFileError> for Failure {
    fn from(error: SecretFileError) -> Self {
        Self::of(RIOP_OPTION, false, &error)
    }
}

impl From<OpenError> for Failure {
    fn from(error: OpenError) -> Self {
        let failure = Self::of(open_code(&error), error.is_retryable(), &error);
        Self { members: members::of_open(&error), ..failure }
    }
}

impl From<CreateError> for Failure {
    fn from(error: CreateError) -> Self {
        let failure = Self::of(create_code(&error), error.is_retryable(), &error);
        Self { members: members::of_create(&error), ..failure }
    }
}

impl From<ListError> for Failure {
    fn from(error: ListError) -> Self {
        Self::of(list_code(&error), error.is_retryable(), &error)
    }
}

impl From<StreamError> for Failure {
    fn from(error: StreamError) -> Self {
        Self::of(stream_code(&error), error.is_retryable(), &error)
    }
}

impl From<ReopenError> for Failure {
    fn from(error: ReopenError) -> Self {
        let code = match &error {
            ReopenError::Healthy { .. } => RIOP_HEALTHY,
            ReopenError::Recover(error) => recover_code(error),
            ReopenError::Stream(error) => stream_code(error),
            _ => RIOP_OTHER,
        };
        Self::of(code, error.is_retryable(), &error)
    }
}

impl From<AcknowledgeError> for Failure {
    fn from(error: AcknowledgeError) -> Self {
        let code = match &error {
            AcknowledgeError::NotPending { .. } => RIOP_NOT_PENDING,
            AcknowledgeError::Recover(error) => recover_code(error),
            _ => RIOP_OTHER,
        };
        Self::of(code, error.is_retryable(), &error)
    }
}

impl From<StreamFailure> for Failure {
    fn from(error: StreamFailure) -> Self {
        // The call itself never succeeds again: the stream must be reopened first.
        Self { can_reopen: error.is_retryable(), ..Self::of(RIOP_FAILED, false, &error) }
    }
}

impl From<SubmitErrorKind> for Failure {
    fn from(error: SubmitErrorKind) -> Self {
        let code = match error {
            SubmitErrorKind::Poisoned(failure) => return failure.into(),
            SubmitErrorKind::Full(_) => RIOP_FULL,
            SubmitErrorKind::TooLarge(_) | SubmitErrorKind::TooManyEntries => RIOP_TOO_LARGE,
            SubmitErrorKind::Empty => RIOP_EMPTY,
            SubmitErrorKind::NoFollower { .. } => RIOP_FOLLOWER,
            SubmitErrorKind::OutOfRange { .. } => RIOP_RANGE,
            SubmitErrorKind::Violation(_) => RIOP_VIOLATION,
            _ => RIOP_OTHER,
        };
        Self::of(code, error.is_retryable(), &error)
    }
}

impl From<WaitError> for Failure {
    fn from(error: WaitError) -> Self {
        let code = match error {
            WaitError::Failed(failure) => return failure.into(),
            WaitError::Deadline(_) => RIOP_TIMEOUT,
            WaitError::NotSubmitted { .. } => RIOP_NOT_SUBMITTED,
            WaitError::Woken => RIOP_WOKEN,
            WaitError::Closed { .. } | WaitError::Dropped { .. } => RIOP_CLOSED,
            _ => RIOP_OTHER,
        };
        Self::of(code, error.is_retryable(), &error)
    }
}

impl From<ReadError> for Failure {
    fn from(error: ReadError) -> Self {
        let code = match &error {
            ReadError::Failed(failure) => return failure.clone().into(),
            ReadError::OutOfRange { .. } => RIOP_RANGE,
            ReadError::Deadline(_) => RIOP_TIMEOUT,
            ReadError::Cancelled => RIOP_CANCELLED,
            ReadError::Full(_) => RIOP_FULL,
            ReadError::Closed => RIOP_CLOSED,
            ReadError::Call { source, .. } => call_code(source),
            ReadError::Connect(error) => stream_code(error),
            ReadError::Target { cause, .. } => cause_code(cause),
            ReadError::Status { .. } => RIOP_READ,
            _ => RIOP_OTHER,
        };
        Self::of(code, error.is_retryable(), &error)
    }
}

impl From<BufError> for Failure {
    fn from(error: BufError) -> Self {
        let code = match error {
            BufError::NotBlocks { .. } => RIOP_RANGE,
            BufError::TooLarge { .. } => RIOP_TOO_LARGE,
            BufError::NoMemory { .. } => RIOP_RESOURCES,
            _ => RIOP_OTHER,
        };
        Self::of(code, code == RIOP_RESOURCES, &error)
    }
}

impl From<CloseError> for Failure {
    fn from(error: CloseError) -> Self {
        let code = match &error {
            CloseError::StreamsOpen(_) => RIOP_STREAMS_OPEN,
            CloseError::Call { source, .. } => call_code(source),
            _ => RIOP_OTHER,
        };
        Self::of(code, error.is_retryable(), &error)
    }
}

impl From<Exhausted> for Failure {
    fn from(error: Exhausted) -> Self {
        Self::of(RIOP_RESOURCES, true, &error)
    }
}

impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Self {
        Self::of(RIOP_OTHER, false, &error)
    }
}

impl From<DeleteError> for Failure {
    fn from(error: DeleteError) -> Self {
        let code = match &error {
            DeleteError::List(error) => list_code(error),
            DeleteError::Unknown(_) | DeleteError::NoNamespace { .. } => RIOP_NOT_FOUND,
            DeleteError::Ambiguous(_)
            | DeleteError::Missing { .. }
            | DeleteError::Contradiction(_) => RIOP_MEMBERS,
            DeleteError::Owned { .. } => RIOP_OWNED,
            DeleteError::NoLabel(_)
            | DeleteError::InUse { .. }
            | DeleteError::UnreadableLabel { .. }
            | DeleteError::Changed(_) => RIOP_DRIVE,
            _ => RIOP_OTHER,
        };
        let failure = Self::of(code, error.is_retryable(), &error);
        Self { members: members::of_delete(&error), ..failure }
    }
}
