//! Failures, for people and for scripts: a message, a remedy, an exit code.

use std::{error::Error, fmt, process::ExitCode};

use riopipe_media::OpenError;
use riopipe_target::{LogOpenError, StartError};
use serde::Serialize;

/// The exit codes. Scripts depend on them: `rio --help` and docs/program.md list them, and their
/// numbers never change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Code {
    /// A local file, the terminal, or anything else without a code of its own.
    Failed = 1,
    /// The command line or a configuration is invalid.
    Usage = 2,
    /// A target can't be reached, or refuses the connection.
    Connection = 3,
    /// The volume can't be created or opened as requested: labels, members, owner, log, engine.
    Volume = 4,
    /// The content is not that which was written: a difference, a wrong checksum, no file.
    Differs = 5,
    /// A write, read or FLUSH on an open volume failed, or a connection was lost.
    Storage = 6,
    /// A drive, a log or an address can't be served.
    Media = 7,
    /// Ctrl-C, SIGTERM or SIGHUP; operations in flight were completed in order.
    Interrupted = 130,
    /// The reader of standard output has gone: the code that a shell reports for a process that
    /// SIGPIPE ends.
    Unread = 141,
}

impl Code {
    /// All codes, lowest first.
    pub const ALL: [Self; 9] = [
        Self::Failed,
        Self::Usage,
        Self::Connection,
        Self::Volume,
        Self::Differs,
        Self::Storage,
        Self::Media,
        Self::Interrupted,
        Self::Unread,
    ];

    /// The meaning of a code, in one line.
    #[must_use]
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::Failed => "something else failed, such as a local file",
            Self::Usage => "the command line or a configuration makes no sense",
            Self::Connection => "a target can't be reached, or refuses the connection",
            Self::Volume => "the volume can't be created or opened as asked",
            Self::Differs => "what was read is not what was written, or no file is there",
            Self::Storage => "a write, read or FLUSH failed on an open volume",
            Self::Media => "a drive, a log or an address can't be served",
            Self::Interrupted => "interrupted by Ctrl-C, SIGTERM or SIGHUP",
            Self::Unread => "the reader of standard output has gone",
        }
    }
}

/// The failure of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The exit code.
    pub code: Code,
    /// The operation, its object, and the reason of the failure.
    pub message: String,
    /// The remedy, if the message does not contain it.
    pub hint: Option<String>,
    /// Whether another process has printed it already.
    pub is_reported: bool,
}

impl Failure {
    /// A failure of this kind.
    #[must_use]
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), hint: None, is_reported: false }
    }

    /// A failure of the storage, with the error's own text.
    #[must_use]
    pub fn storage(error: &dyn Error) -> Self {
        Self::new(Code::Storage, error.to_string())
    }

    /// A failure that another process has printed.
    #[must_use]
    pub fn reported(code: Code) -> Self {
        Self { is_reported: true, ..Self::new(code, String::new()) }
    }

    /// Adds `error` and all of its sources to the message.
    #[must_use]
    pub fn because(mut self, error: &dyn Error) -> Self {
        let mut cause = Some(error);
        while let Some(error) = cause {
            let text = error.to_string();
            // Many errors quote their source; it should appear once.
            if !text.is_empty() && !self.message.contains(&text) {
                self.message.push_str(": ");
                self.message.push_str(&text);
            }
            cause = error.source();
        }
        self
    }

    /// Puts the work that failed before the message. An interruption needs no place.
    #[must_use]
    pub fn during(mut self, work: &str) -> Self {
        if self.code != Code::Interrupted {
            self.message = format!("{work}: {}", self.message);
        }
        self
    }

    /// Adds the remedy.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// The process's exit code.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.code as u8)
    }

    /// One JSON object on one line: the form of a failure on standard error with `-o json`.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::json!({ "error": self.to_json_value() }).to_string()
    }

    /// The failure as a JSON object: `code`, `kind`, `message`, and `hint` if there is one.
    #[must_use]
    pub fn to_json_value(&self) -> serde_json::Value {
        #[derive(Serialize)]
        struct Fields<'a> {
            code: u8,
            kind: Code,
            message: &'a str,
            #[serde(skip_serializing_if = "Option::is_none")]
            hint: Option<&'a str>,
        }
        let fields = Fields {
            code: self.code as u8,
            kind: self.code,
            message: &self.message,
            hint: self.hint.as_deref(),
        };
        // Strings and a number: serialisation can't fail.
        serde_json::to_value(&fields).unwrap_or_default()
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.hint {
            Some(hint) => write!(f, "\n  {hint}"),
            None => Ok(()),
        }
    }
}

impl Error for Failure {}

/// The exit code of a target that doesn't start.
pub(crate) fn start_failure(error: &StartError) -> Failure {
    let failure = |code| Failure::new(code, "the target can't start").because(error);
    match error {
        StartError::Config(_) => failure(Code::Usage)
            .hint("`rio target serve --help` shows what is needed; `rio target check` shows more"),
        StartError::NamespaceId(_)
        | StartError::LbaSize { .. }
        | StartError::Drive { source: OpenError::Spec { .. }, .. }
        | StartError::Log { source: LogOpenError::Store(OpenError::Spec { .. }), .. } => {
            failure(Code::Usage)
        }
        StartError::Identity { .. } => failure(Code::Media).hint(
            "`rio target identity DRIVE` shows a drive's identity; a configuration file may give \
             each namespace a uuid",
        ),
        StartError::Missing { .. } | StartError::Empty { .. } => {
            failure(Code::Media).hint("on the command line create is --create")
        }
        StartError::Log { .. } if error.to_string().contains("accept_lost_log") => {
            failure(Code::Media).hint("on the command line accept_lost_log is --accept-lost-log")
        }
        StartError::Drive { .. } | StartError::Log { .. } | StartError::Listen(_) => {
            failure(Code::Media)
        }
        StartError::Poller(_) | StartError::Thread(_) | StartError::Tls(_) => failure(Code::Failed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("can't connect to 127.0.0.1:1")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn causes_appear_once() {
        let refused = || std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        let failure = Failure::new(Code::Connection, "discovery").because(&Outer(refused()));
        assert_eq!(
            failure.to_string(),
            "discovery: can't connect to 127.0.0.1:1: connection refused"
        );
        let quoting = Failure::new(Code::Failed, "no: connection refused").because(&refused());
        assert_eq!(quoting.to_string(), "no: connection refused");
    }

    #[test]
    fn json_has_code_kind_message_and_hint() {
        let failure = Failure::new(Code::Volume, "taken").hint("use --take-over");
        let value: serde_json::Value = serde_json::from_str(&failure.to_json()).unwrap();
        assert_eq!(
            value,
            serde_json::json!({"error": {
                "code": 4, "kind": "volume", "message": "taken", "hint": "use --take-over"
            }})
        );
        assert!(!Failure::new(Code::Failed, "x").to_json().contains("hint"));
    }

    #[test]
    fn codes_are_distinct_and_not_success() {
        let codes = Code::ALL.map(|code| code as u8);
        assert_eq!(codes, [1, 2, 3, 4, 5, 6, 7, 130, 141]);
    }
}
