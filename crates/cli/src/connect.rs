//! From the command line to the library: who connects, to which drives, and what its errors mean
//! for the exit code.

use std::net::IpAddr;

use riopipe::{
    AttachError, CallError, ConnectOptions, CreateError, MemberAddr, OpenError, StreamError,
};

use crate::{
    args::connect::{Connect, Digest},
    failure::{Code, Failure},
};

/// Who we are and how we connect.
#[must_use]
pub fn connect_options(args: &Connect) -> ConnectOptions {
    let mut options = ConnectOptions {
        header_digest: args.hdr_digest,
        data_digest: match args.data_digest {
            Digest::Auto => None,
            Digest::On => Some(true),
            Digest::Off => Some(false),
        },
        timeout: args.timeout,
        loss_timeout: args.loss_timeout,
        ..ConnectOptions::default()
    };
    if let Some(nqn) = &args.hostnqn {
        options.host_nqn.clone_from(nqn);
    }
    if let Some(id) = args.hostid {
        options.host_id = id;
    }
    options
}

/// The members, in order.
///
/// # Errors
/// The first that is no address.
pub fn members(texts: &[String]) -> Result<Vec<MemberAddr>, Failure> {
    let parse = |text: &String| {
        // An IPv6 address alone would need brackets, which nobody remembers.
        let whole = match text.split(',').next().map(str::parse::<IpAddr>) {
            Some(Ok(IpAddr::V6(ip))) => {
                text.replacen(&text[..host_len(text)], &format!("[{ip}]"), 1)
            }
            _ => text.clone(),
        };
        whole.parse::<MemberAddr>().map_err(|error| Failure::new(Code::Usage, error.to_string()))
    };
    texts.iter().map(parse).collect()
}

fn host_len(text: &str) -> usize {
    text.find(',').unwrap_or(text.len())
}

/// No target at the other end, or one that refuses us.
#[must_use]
pub fn attach_failure(error: &AttachError) -> Failure {
    let failure = Failure::new(Code::Connection, error.to_string());
    match error {
        AttachError::Target { .. } => {
            failure.hint("`rio discover -a ADDR -s PORT` lists the NQNs that are offered there")
        }
        // These say what to do themselves.
        AttachError::Connect(_) | AttachError::WhichSubsystem { .. } | AttachError::Several(_) => {
            failure
        }
    }
}

fn call_code(error: &CallError) -> Code {
    match error {
        CallError::Status(_) => Code::Volume,
        _ => Code::Connection,
    }
}

/// A volume that can't be made.
#[must_use]
pub fn create_failure(name: &str, error: &CreateError) -> Failure {
    let code = match error {
        CreateError::Attach(error) => return attach_failure(error),
        CreateError::Name | CreateError::Options(_) | CreateError::Twice(_) => Code::Usage,
        CreateError::Call { source, .. } => call_code(source),
        _ => Code::Volume,
    };
    Failure::new(code, format!("can't create volume {name:?}")).because(error)
}

/// A volume that can't be opened or looked at.
#[must_use]
pub fn open_failure(error: &OpenError) -> Failure {
    let code = match error {
        OpenError::Attach(error) => return attach_failure(error),
        OpenError::Call { source, .. } => call_code(source),
        _ => Code::Volume,
    };
    Failure::new(code, error.to_string())
}

/// A stream that can't be opened.
#[must_use]
pub fn stream_failure(error: &StreamError) -> Failure {
    let code = match error {
        StreamError::Connect(_) => Code::Connection,
        StreamError::Target { source, .. } => call_code(source),
        _ => Code::Volume,
    };
    Failure::new(code, error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(text: &str) -> Result<MemberAddr, Failure> {
        members(&[text.to_owned()]).map(|mut members| members.remove(0))
    }

    #[test]
    fn members_in_all_forms() {
        for (text, host, port) in [
            ("192.0.2.1", "192.0.2.1", 4420),
            ("192.0.2.1:7", "192.0.2.1", 7),
            ("::1", "::1", 4420),
            ("[::1]:7", "::1", 7),
            ("::1,ns=2", "::1", 4420),
            ("box,nqn=nqn.2026-11.com.example:a", "box", 4420),
        ] {
            let member = one(text).unwrap();
            assert_eq!((member.host.as_str(), member.port), (host, port), "{text}");
        }
        assert_eq!(one("::1,ns=2").unwrap().nsid, 2);
    }

    #[test]
    fn a_bad_member_is_a_usage_error_that_shows_how() {
        for text in ["", "a:b", "a,ns=x", "a:0", "a,colour=red"] {
            let failure = one(text).unwrap_err();
            assert_eq!(failure.code, Code::Usage, "{text}");
            assert!(failure.message.contains("ADDR[:PORT]"), "{failure}");
        }
    }
}
