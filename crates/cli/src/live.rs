//! Reading the metrics of a running target, volume or file system, once or repeatedly: `rio target
//! stat` and `rio volume stat`, over HTTP, and `rio fs stat`.

use std::{
    io::{ErrorKind, Read, Write},
    net::{TcpStream, ToSocketAddrs},
    thread,
    time::{Duration, Instant},
};

use riopipe::VolumeStat;
use riopipe_lab::terminal::Terminal;
use riopipe_metrics::{TARGET_PORT, VOLUME_PORT};
use riopipe_net::HostPort;
use riopipe_target::Stat;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    failure::{Code, Failure},
    interrupt::Interrupt,
    output::{Output, Report},
};

/// Longest time for an answer.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Largest answer in bytes.
const ANSWER_BYTES_MAX: u64 = 4 << 20;
/// Interval in which the end is checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The kind of a source of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceKind {
    /// A target, with `rio target serve --metrics`.
    Target,
    /// A program that has a volume open.
    Volume,
}

impl SourceKind {
    const ALL: [Self; 2] = [Self::Target, Self::Volume];

    const fn schema(self) -> &'static str {
        match self {
            Self::Target => Stat::SCHEMA,
            Self::Volume => VolumeStat::SCHEMA,
        }
    }

    /// Whether this is its schema, of any version.
    fn has_schema(self, schema: &str) -> bool {
        let kind = |schema: &'static str| schema.split('/').next().unwrap_or_default();
        schema.split('/').next() == Some(kind(self.schema()))
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Target => "target",
            Self::Volume => "volume",
        }
    }

    const fn default_port(self) -> u16 {
        match self {
            Self::Target => TARGET_PORT,
            Self::Volume => VOLUME_PORT,
        }
    }

    const fn metrics(self) -> &'static str {
        match self {
            Self::Target => "a Rio target's --metrics",
            Self::Volume => "a Rio volume's metrics",
        }
    }

    const fn hint(self) -> &'static str {
        match self {
            Self::Target => {
                "a target that was started with `rio target serve --metrics ADDR:PORT` serves \
                 metrics at that address, which is not the address of its drives"
            }
            Self::Volume => {
                "a volume's metrics are served by the program that has it open: `rio bench run \
                 --metrics ADDR:PORT`, or one that serves Volume::stat_source; a target is asked \
                 with `rio target stat`"
            }
        }
    }

    fn is_not_at(self, address: &str, why: &str) -> Failure {
        let metrics = self.metrics();
        Failure::new(Code::Connection, format!("{address} is not {metrics}: {why}"))
            .hint(self.hint())
    }
}

/// The metrics of a source.
pub trait Figures: Clone + Serialize {
    /// The difference from `before`.
    #[must_use]
    fn since(&self, before: &Self) -> Self;

    /// The text; each line ends with a newline. With `before`, it is about the time since then.
    fn text(&self, before: Option<&Self>, terminal: &Terminal) -> String;
}

/// Metrics that are served over HTTP.
pub trait ServedFigures: Figures + DeserializeOwned {
    /// The kind of the source.
    const KIND: SourceKind;
}

/// Shows the metrics at `address`: once, or repeatedly the difference since the last time.
///
/// # Errors
/// There is no source at the address, or one of another kind.
pub fn show<F: ServedFigures>(
    address: &str,
    watch: Option<Duration>,
    output: &Output,
) -> Result<(), Failure> {
    let address = parse(address, F::KIND)?;
    show_each(Some(&address), watch, output, || ask::<F>(&address))
}

/// Shows the metrics that `ask` returns: once, or repeatedly the difference since the last time.
/// `address` is that of the source, if it has one.
///
/// # Errors
/// Those of `ask`.
pub fn show_each<F: Figures>(
    address: Option<&str>,
    watch: Option<Duration>,
    output: &Output,
    mut ask: impl FnMut() -> Result<F, Unanswered>,
) -> Result<(), Failure> {
    let interrupt = watch.map(|_| Interrupt::watch_silently()).transpose()?;
    let named = |why: String| match address {
        Some(address) => format!("{address}: {why}"),
        None => why,
    };
    let mut before: Option<F> = None;
    let mut is_missed = false;
    loop {
        match ask() {
            Ok(now) => {
                if before.is_some() && !output.is_json() {
                    output.raw(b"\n")?;
                }
                let stat = before.as_ref().map_or_else(|| now.clone(), |before| now.since(before));
                let is_interval = before.is_some();
                output.result(&Reading { stat, address, is_interval, before: before.as_ref() })?;
                before = Some(now);
                is_missed = false;
            }
            // The watch continues: a measurement opens its volume again for each run.
            Err(Unanswered::Gone(why)) if watch.is_some() => {
                if !std::mem::replace(&mut is_missed, true) {
                    output.note(named(why));
                }
            }
            Err(Unanswered::Gone(why)) => {
                return Err(Failure::new(Code::Connection, named(why)));
            }
            Err(Unanswered::Failed(failure)) => return Err(failure),
        }
        let (Some(every), Some(interrupt)) = (watch, &interrupt) else {
            return Ok(());
        };
        let due = Instant::now() + every;
        while Instant::now() < due {
            if interrupt.requested() {
                return Ok(());
            }
            thread::sleep(CHECK_INTERVAL.min(due.saturating_duration_since(Instant::now())));
        }
    }
}

/// An address, also in the form of a browser's or a Prometheus configuration's URL; returns it with
/// its port.
fn parse(text: &str, kind: SourceKind) -> Result<String, Failure> {
    let text = text.strip_prefix("http://").unwrap_or(text);
    let text = text.split('/').next().unwrap_or_default();
    match text.parse::<HostPort>() {
        Ok(address) => Ok(address.with_port(kind.default_port())),
        Err(error) => Err(Failure::new(Code::Usage, format!("{text:?} is no address: {error}"))
            .hint(format!(
                "give what the {0} was given, as in `rio {0} stat 127.0.0.1:{1}`",
                kind.name(),
                kind.default_port()
            ))),
    }
}

/// The reason why there are no metrics.
#[derive(Debug)]
pub enum Unanswered {
    /// The source is gone, or not there yet: a sentence for people.
    Gone(String),
    /// There is no source, or one of another kind.
    Failed(Failure),
}

impl From<Failure> for Unanswered {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

/// Reads the current metrics.
fn ask<F: ServedFigures>(address: &str) -> Result<F, Unanswered> {
    #[derive(Deserialize)]
    struct Head {
        schema: String,
    }
    let kind = F::KIND;
    let body = fetch(address, kind)?;
    let invalid = |error: serde_json::Error| {
        kind.is_not_at(address, &format!("its answer can't be understood: {error}"))
    };
    let Head { schema } = serde_json::from_slice(&body).map_err(invalid)?;
    if schema == kind.schema() {
        return Ok(serde_json::from_slice(&body).map_err(invalid)?);
    }
    let found = SourceKind::ALL.into_iter().find(|found| found.has_schema(&schema));
    let failure = match found {
        Some(found) if found == kind => Failure::new(
            Code::Connection,
            format!("the {} at {address} serves {schema:?}, not {:?}", kind.name(), kind.schema()),
        )
        .hint("it is of another version; use the `rio` that serves it"),
        Some(found) => kind
            .is_not_at(address, &format!("a {} serves metrics there", found.name()))
            .hint(format!("ask it with `rio {} stat {address}`", found.name())),
        None => kind.is_not_at(address, &format!("it serves {schema:?}")),
    };
    Err(failure.into())
}

/// The body of `/stat`.
fn fetch(address: &str, kind: SourceKind) -> Result<Vec<u8>, Unanswered> {
    let failed = |error: &std::io::Error| match error.kind() {
        ErrorKind::ConnectionRefused => {
            Failure::new(Code::Connection, format!("no program listens at {address}"))
                .hint(kind.hint())
        }
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            kind.is_not_at(address, &format!("no answer within {} s", TIMEOUT.as_secs()))
        }
        ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted | ErrorKind::BrokenPipe => {
            kind.is_not_at(address, "it closed the connection")
        }
        _ => Failure::new(Code::Connection, format!("can't ask {address}")).because(error),
    };
    let mut answer = Vec::new();
    let asked = (|| {
        let peer = address.to_socket_addrs()?.next().ok_or(ErrorKind::NotFound)?;
        let mut socket = TcpStream::connect_timeout(&peer, TIMEOUT)?;
        socket.set_read_timeout(Some(TIMEOUT))?;
        socket.set_write_timeout(Some(TIMEOUT))?;
        let ask = format!("GET /stat HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
        socket.write_all(ask.as_bytes())?;
        socket.take(ANSWER_BYTES_MAX).read_to_end(&mut answer)
    })();
    // A server that doesn't speak HTTP may close in many ways; an earlier answer of it explains
    // more.
    if let Err(error) = asked
        && answer.is_empty()
    {
        return Err(failed(&error).into());
    }
    let mut fields = [httparse::EMPTY_HEADER; 64];
    let mut response = httparse::Response::new(&mut fields);
    let failure = match response.parse(&answer) {
        Ok(httparse::Status::Complete(head)) => match response.code {
            Some(200) => return Ok(answer.split_off(head)),
            Some(410) => {
                let why = String::from_utf8_lossy(&answer[head..]);
                return Err(Unanswered::Gone(why.lines().next().unwrap_or_default().to_owned()));
            }
            code => kind.is_not_at(address, &format!("HTTP status {}", code.unwrap_or(0))),
        },
        Ok(httparse::Status::Partial) => kind.is_not_at(address, "it closed the connection"),
        Err(_) => kind.is_not_at(address, "it doesn't speak HTTP"),
    };
    Err(failure.into())
}

#[derive(Debug, Serialize)]
struct Reading<'a, F> {
    #[serde(flatten)]
    stat: F,
    /// The address of the source, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<&'a str>,
    /// Whether counters and stages are those since the last reading, `uptime_s` ago, and not since
    /// the start.
    is_interval: bool,
    #[serde(skip)]
    before: Option<&'a F>,
}

impl<F: Figures> Report for Reading<'_, F> {
    fn text(&self, terminal: &Terminal) -> String {
        self.stat.text(self.before, terminal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_as_people_write_them() {
        let parse = |text| parse(text, SourceKind::Volume);
        for text in ["127.0.0.1:9420", "http://127.0.0.1:9420/metrics", "http://127.0.0.1:9420"] {
            assert_eq!(parse(text).as_deref(), Ok("127.0.0.1:9420"));
        }
        for text in ["::1", "[::1]", "[::1]:9421", "http://[::1]:9421/stat"] {
            assert_eq!(parse(text).as_deref(), Ok("[::1]:9421"));
        }
        for wrong in ["", ":9420", "localhost:", "localhost:port", "9420"] {
            let failure = parse(wrong).unwrap_err();
            assert_eq!(failure.code, Code::Usage, "{wrong}");
            assert!(failure.hint.unwrap().contains("rio volume stat"));
        }
    }

    #[test]
    fn a_schema_identifies_its_source() {
        for kind in SourceKind::ALL {
            let of = SourceKind::ALL.into_iter().filter(|found| found.has_schema(kind.schema()));
            assert_eq!(of.collect::<Vec<_>>(), [kind]);
        }
        assert!(SourceKind::Volume.has_schema("rio-volume-stat/77"));
        assert!(!SourceKind::Volume.has_schema("rio-volume/1"));
    }
}
