//! `rio fs mount --daemon`: a mount that goes to the background once it is mounted.
//!
//! The program starts itself again, with a variable that makes the second process the *child*. The
//! child mounts, prints its result into a pipe, and detaches: from the terminal, the session and the
//! directory. The first process prints the result and ends with 0. If the child ends before that,
//! the first process ends with its exit code; the child has printed why.

use std::{
    fs::File,
    io::{self, Read},
    os::{fd::AsFd, unix::process::CommandExt},
    path::Path,
    process::{Child, Command, Stdio},
};

use crate::{
    failure::{Code, Failure},
    logging,
    output::Output,
};

/// The variable of the child.
const VARIABLE: &str = "RIO_FS_DAEMON";
/// The socket of the system's log.
const SYSLOG: &str = "/dev/log";

/// Whether this process is the one that mounts.
pub(super) fn is_child() -> bool {
    std::env::var_os(VARIABLE).is_some()
}

/// Starts the child, and waits until it has mounted the file system, or has failed.
pub(super) fn start(output: &Output) -> Result<(), Failure> {
    let failed = |error: io::Error| {
        Failure::new(Code::Failed, "can't start the process of the background").because(&error)
    };
    let program = std::env::current_exe().map_err(failed)?;
    let child = Command::new(program)
        .args(std::env::args_os().skip(1))
        .env(VARIABLE, "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn();
    let mut child = child.map_err(failed)?;
    let mut result = Vec::new();
    if let Some(stdout) = &mut child.stdout {
        // The end of the pipe: the child has detached, or has ended.
        stdout.read_to_end(&mut result).map_err(failed)?;
    }
    match result.is_empty() {
        false => output.raw(&result),
        true => Err(failure_of(&mut child)),
    }
}

/// The failure of a child that has ended without a result.
fn failure_of(child: &mut Child) -> Failure {
    let status = child.wait().ok();
    let code = status.and_then(|status| status.code());
    match Code::ALL.into_iter().find(|known| Some(i32::from(*known as u8)) == code) {
        Some(code) => Failure::reported(code),
        None => Failure::new(Code::Failed, "the process of the background has ended, not mounted"),
    }
}

/// The destination of the child's log, once it has detached.
pub(super) struct Log {
    destination: File,
}

impl Log {
    /// Opens the log: a file, `syslog`, or by default syslog.
    ///
    /// # Errors
    /// It can't be opened.
    pub(super) fn open(log: Option<&Path>) -> Result<Self, Failure> {
        let destination = match log {
            Some(path) if path != Path::new("syslog") => {
                let file = File::options().create(true).append(true).open(path);
                file.map_err(|error| {
                    let what = format!("can't open the log {}", path.display());
                    Failure::new(Code::Failed, what).because(&error)
                })?
            }
            _ => syslog()?,
        };
        Ok(Self { destination })
    }

    /// Detaches this process from the terminal, and from the process that has started it.
    ///
    /// # Errors
    /// The system refuses.
    pub(super) fn detach(self) -> Result<(), Failure> {
        let failed = |error: io::Error| {
            Failure::new(Code::Failed, "can't go to the background").because(&error)
        };
        let null = File::options().read(true).write(true).open("/dev/null").map_err(failed)?;
        std::env::set_current_dir("/").map_err(failed)?;
        // It fails for the leader of a process group, which then has no terminal to lose.
        let _ = rustix::process::setsid();
        rustix::stdio::dup2_stdin(&null).map_err(|error| failed(error.into()))?;
        rustix::stdio::dup2_stderr(&self.destination).map_err(|error| failed(error.into()))?;
        logging::redirect(self.destination);
        // The last step: it ends the wait of the first process.
        rustix::stdio::dup2_stdout(null.as_fd()).map_err(|error| failed(error.into()))
    }
}

/// The input of a process that passes lines on to the system's log.
fn syslog() -> Result<File, Failure> {
    let hint = "give a file: --log FILE";
    if !Path::new(SYSLOG).exists() {
        return Err(Failure::new(Code::Failed, format!("there is no system log here ({SYSLOG})"))
            .hint(hint));
    }
    let tag = format!("rio-fs[{}]", std::process::id());
    let logger = Command::new("logger")
        .args(["--priority", "daemon.info", "--tag", &tag])
        // The end of the terminal does not end it.
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let failed = |error: &io::Error| {
        Failure::new(Code::Failed, "can't run logger, which writes to the system log")
            .because(error)
            .hint(hint)
    };
    // It ends when the pipe does.
    let input = logger.map_err(|error| failed(&error))?.stdin;
    let input = input.ok_or_else(|| failed(&io::ErrorKind::BrokenPipe.into()))?;
    Ok(File::from(std::os::fd::OwnedFd::from(input)))
}
