//! Asking somebody who tells his figures over HTTP, once or again and again: `rio target stat` and
//! `rio volume stat`.

use std::{
    io::{ErrorKind, Read, Write},
    net::{TcpStream, ToSocketAddrs},
    thread,
    time::{Duration, Instant},
};

use riopipe::VolumeStat;
use riopipe_lab::terminal::Terminal;
use riopipe_target::Stat;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    failure::{Code, Failure},
    interrupt::Interrupt,
    output::{Output, Report},
};

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// More than this nobody has to say.
const ANSWER_BYTES_MAX: u64 = 4 << 20;
/// How often it is looked whether to end.
const LOOK: Duration = Duration::from_millis(50);

/// Who tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Teller {
    /// A target, with `rio target serve --metrics`.
    Target,
    /// A program that has a volume open.
    Volume,
}

impl Teller {
    const ALL: [Self; 2] = [Self::Target, Self::Volume];

    const fn schema(self) -> &'static str {
        match self {
            Self::Target => Stat::SCHEMA,
            Self::Volume => VolumeStat::SCHEMA,
        }
    }

    /// Whether this is its schema, of whatever version.
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

    const fn metrics(self) -> &'static str {
        match self {
            Self::Target => "a Rio target's --metrics",
            Self::Volume => "a Rio volume's metrics",
        }
    }

    const fn hint(self) -> &'static str {
        match self {
            Self::Target => {
                "a target that was started with `rio target serve --metrics ADDR:PORT` tells, at \
                 that address; that of its drives is another"
            }
            Self::Volume => {
                "a volume tells while somebody has it open and wants it to: `rio bench run \
                 --metrics ADDR:PORT`, or a program with Volume::serve_metrics; a target is asked \
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

/// Figures of somebody who runs.
pub trait Figures: Clone + DeserializeOwned + Serialize {
    /// Whose.
    const TELLER: Teller;

    /// What has happened between the two.
    #[must_use]
    fn since(&self, before: &Self) -> Self;

    /// The text, each line ended. With `before` these are the figures since then.
    fn text(&self, before: Option<&Self>, terminal: &Terminal) -> String;
}

/// Shows what is told at `address`: once, or then every so often what came in between.
///
/// # Errors
/// Nobody tells there, or somebody else.
pub fn show<F: Figures>(
    address: &str,
    watch: Option<Duration>,
    output: &Output,
) -> Result<(), Failure> {
    let address = parse(address, F::TELLER)?;
    let interrupt = watch.map(|_| Interrupt::watch()).transpose()?;
    let mut before: Option<F> = None;
    let mut is_missed = false;
    loop {
        match ask::<F>(address) {
            Ok(now) => {
                if before.is_some() && !output.is_json() {
                    output.raw(b"\n")?;
                }
                let stat = before.as_ref().map_or_else(|| now.clone(), |before| now.since(before));
                let is_interval = before.is_some();
                output.result(&Look { stat, address, is_interval, before: before.as_ref() })?;
                before = Some(now);
                is_missed = false;
            }
            // Who watches waits: a measurement opens its volume again for each run.
            Err(Unanswered::Gone(why)) if watch.is_some() => {
                if !std::mem::replace(&mut is_missed, true) {
                    output.note(format!("{address}: {why}"));
                }
            }
            Err(Unanswered::Gone(why)) => {
                return Err(Failure::new(Code::Connection, format!("{address}: {why}")));
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
            thread::sleep(LOOK.min(due.saturating_duration_since(Instant::now())));
        }
    }
}

/// `ADDR:PORT`, also as people copy it from a browser or a Prometheus configuration.
fn parse(text: &str, teller: Teller) -> Result<&str, Failure> {
    let text = text.strip_prefix("http://").unwrap_or(text);
    let text = text.split('/').next().unwrap_or_default();
    match text.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => Ok(text),
        _ => Err(Failure::new(Code::Usage, format!("{text:?} is no address with a port")).hint(
            format!(
                "give what the {0} was given, as in `rio {0} stat 127.0.0.1:9420`",
                teller.name()
            ),
        )),
    }
}

/// Why there are no figures.
#[derive(Debug)]
enum Unanswered {
    /// There were, or will be: a sentence for people.
    Gone(String),
    Failed(Failure),
}

impl From<Failure> for Unanswered {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

/// What is told there now.
fn ask<F: Figures>(address: &str) -> Result<F, Unanswered> {
    #[derive(Deserialize)]
    struct Head {
        schema: String,
    }
    let teller = F::TELLER;
    let body = fetch(address, teller)?;
    let senseless = |error: serde_json::Error| {
        teller.is_not_at(address, &format!("its answer makes no sense: {error}"))
    };
    let Head { schema } = serde_json::from_slice(&body).map_err(senseless)?;
    if schema == teller.schema() {
        return Ok(serde_json::from_slice(&body).map_err(senseless)?);
    }
    let who = Teller::ALL.into_iter().find(|who| who.has_schema(&schema));
    let failure = match who {
        Some(who) if who == teller => Failure::new(
            Code::Connection,
            format!(
                "the {} at {address} tells {schema:?}, not {:?}",
                teller.name(),
                teller.schema()
            ),
        )
        .hint("it is of another version; use the `rio` that serves it"),
        Some(who) => teller
            .is_not_at(address, &format!("a {} tells there", who.name()))
            .hint(format!("ask it with `rio {} stat {address}`", who.name())),
        None => teller.is_not_at(address, &format!("it tells {schema:?}")),
    };
    Err(failure.into())
}

/// The body of `/stat`.
fn fetch(address: &str, teller: Teller) -> Result<Vec<u8>, Unanswered> {
    let failed = |error: &std::io::Error| match error.kind() {
        ErrorKind::ConnectionRefused => {
            Failure::new(Code::Connection, format!("nobody listens at {address}"))
                .hint(teller.hint())
        }
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            teller.is_not_at(address, &format!("no answer within {} s", PATIENCE.as_secs()))
        }
        ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted | ErrorKind::BrokenPipe => {
            teller.is_not_at(address, "it hung up")
        }
        _ => Failure::new(Code::Connection, format!("can't ask {address}")).because(error),
    };
    let mut answer = Vec::new();
    let asked = (|| {
        let peer = address.to_socket_addrs()?.next().ok_or(ErrorKind::NotFound)?;
        let mut socket = TcpStream::connect_timeout(&peer, PATIENCE)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.set_write_timeout(Some(PATIENCE))?;
        let ask = format!("GET /stat HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
        socket.write_all(ask.as_bytes())?;
        socket.take(ANSWER_BYTES_MAX).read_to_end(&mut answer)
    })();
    // Whoever doesn't speak HTTP may hang up on it in many ways; what it said first tells more.
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
            code => teller.is_not_at(address, &format!("HTTP status {}", code.unwrap_or(0))),
        },
        Ok(httparse::Status::Partial) => teller.is_not_at(address, "it hung up"),
        Err(_) => teller.is_not_at(address, "it doesn't speak HTTP"),
    };
    Err(failure.into())
}

#[derive(Debug, Serialize)]
struct Look<'a, F> {
    #[serde(flatten)]
    stat: F,
    /// Where it was asked.
    address: &'a str,
    /// Whether counters and stages are those since the last look, `uptime_s` ago, not since the
    /// start.
    is_interval: bool,
    #[serde(skip)]
    before: Option<&'a F>,
}

impl<F: Figures> Report for Look<'_, F> {
    fn text(&self, terminal: &Terminal) -> String {
        self.stat.text(self.before, terminal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_as_people_write_them() {
        let parse = |text| parse(text, Teller::Volume);
        for text in ["127.0.0.1:9420", "http://127.0.0.1:9420/metrics", "http://127.0.0.1:9420"] {
            assert_eq!(parse(text), Ok("127.0.0.1:9420"));
        }
        assert_eq!(parse("[::1]:9420"), Ok("[::1]:9420"));
        for wrong in ["", "127.0.0.1", ":9420", "localhost:", "localhost:port", "9420"] {
            let failure = parse(wrong).unwrap_err();
            assert_eq!(failure.code, Code::Usage, "{wrong}");
            assert!(failure.hint.unwrap().contains("rio volume stat"));
        }
    }

    #[test]
    fn schemas_say_who_tells() {
        for teller in Teller::ALL {
            let of = Teller::ALL.into_iter().filter(|who| who.has_schema(teller.schema()));
            assert_eq!(of.collect::<Vec<_>>(), [teller]);
        }
        assert!(Teller::Volume.has_schema("rio-volume-stat/77"));
        assert!(!Teller::Volume.has_schema("rio-volume/1"));
    }
}
