//! `rio discover`

use riopipe::AttachError;
use riopipe::discovery::{
    ADRFAM_IPV4, ADRFAM_IPV6, Entry, SECTYPE_NONE, SECTYPE_TLS13, SUBTYPE_CURRENT, SUBTYPE_NVM,
    SUBTYPE_REFERRAL, TREQ_NOT_REQUIRED, TREQ_REQUIRED, TRTYPE_TCP,
};
use riopipe_lab::{
    table::{Align, Table},
    terminal::Terminal,
};
use serde::Serialize;

use super::target::port_of;
use crate::{
    args::connect::Discover,
    connect::{attach_failure, connect_options},
    failure::Failure,
    output::{Output, Report},
};

/// The standard port of discovery services.
const DISCOVERY_PORT: u16 = 8009;
/// The standard port of I/O controllers.
const IO_PORT: u16 = 4420;

pub(super) fn run(args: &Discover, output: &Output) -> Result<(), Failure> {
    let options = connect_options(&args.connect)?;
    let host = &args.traddr.host;
    let ask = |port| riopipe::discover(host, port, &options).map(|found| (port, found));
    let answer = match port_of(Some(&args.traddr), args.trsvcid)? {
        Some(port) => ask(port).map_err(|error| attach_failure(&error)),
        None => match ask(DISCOVERY_PORT) {
            Err(error @ AttachError::Connect(_)) => {
                ask(IO_PORT).map_err(|other| neither_port(&error, &other))
            }
            answer => answer.map_err(|error| attach_failure(&error)),
        },
    };
    let (port, entries) = answer?;
    output.result(&Discovered {
        address: host.clone(),
        port,
        records: entries.iter().map(Record::of).collect(),
    })
}

/// The failure for a target that answers on none of the ports that were tried.
fn neither_port(discovery: &AttachError, io: &AttachError) -> Failure {
    let failure = attach_failure(io);
    let message = format!(
        "neither port {DISCOVERY_PORT} nor port {IO_PORT} can be asked: {discovery}; {}",
        failure.message
    );
    Failure { message, ..failure }.hint("-s names another port")
}

/// The answer of a discovery service. The names are nvme-cli's.
#[derive(Debug, Serialize)]
struct Discovered {
    address: String,
    port: u16,
    records: Vec<Record>,
}

#[derive(Debug, Serialize)]
struct Record {
    trtype: String,
    adrfam: String,
    subtype: String,
    portid: u16,
    trsvcid: String,
    subnqn: String,
    traddr: String,
    asqsz: u16,
    treq: String,
    sectype: String,
}

impl Record {
    fn of(entry: &Entry) -> Self {
        Self {
            trtype: named(entry.trtype, &[(TRTYPE_TCP, "tcp"), (1, "rdma"), (2, "fc")]),
            adrfam: named(entry.adrfam, &[(ADRFAM_IPV4, "ipv4"), (ADRFAM_IPV6, "ipv6")]),
            subtype: named(
                entry.subtype,
                &[
                    (SUBTYPE_NVM, "nvme subsystem"),
                    (SUBTYPE_CURRENT, "current discovery subsystem"),
                    (SUBTYPE_REFERRAL, "discovery referral"),
                ],
            ),
            portid: entry.portid,
            trsvcid: entry.trsvcid.clone(),
            subnqn: entry.subnqn.clone(),
            traddr: entry.traddr.clone(),
            asqsz: entry.asqsz,
            treq: named(
                // The higher bits have other meanings.
                entry.treq & 0b11,
                &[
                    (0, "not specified"),
                    (TREQ_REQUIRED, "required"),
                    (TREQ_NOT_REQUIRED, "not required"),
                ],
            ),
            sectype: named(
                entry.sectype,
                &[(SECTYPE_NONE, "none"), (1, "tls12"), (SECTYPE_TLS13, "tls13")],
            ),
        }
    }
}

fn named(value: u8, names: &[(u8, &str)]) -> String {
    let known = names.iter().find(|(known, _)| *known == value);
    known.map_or_else(|| format!("{value}"), |(_, name)| (*name).to_owned())
}

impl Report for Discovered {
    fn text(&self, terminal: &Terminal) -> String {
        if self.records.is_empty() {
            return format!("{}:{} offers nothing\n", self.address, self.port);
        }
        let mut table = Table::new(&[
            ("transport", Align::Left),
            ("address", Align::Left),
            ("port", Align::Right),
            ("NQN", Align::Left),
            ("kind", Align::Left),
            ("TLS", Align::Left),
        ]);
        for record in &self.records {
            table.row([
                record.trtype.as_str(),
                &record.traddr,
                &record.trsvcid,
                &record.subnqn,
                &record.subtype,
                match (record.sectype.as_str(), record.treq.as_str()) {
                    ("none", _) => "no",
                    (_, "required") => "required",
                    _ => "allowed",
                },
            ]);
        }
        table.render(terminal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_values_are_shown_as_numbers() {
        assert_eq!(named(3, &[(3, "tcp")]), "tcp");
        assert_eq!(named(254, &[(3, "tcp")]), "254");
    }

    #[test]
    fn an_empty_log_is_reported() {
        let none = Discovered { address: "a".to_owned(), port: 8009, records: Vec::new() };
        assert_eq!(none.text(&Terminal::PLAIN), "a:8009 offers nothing\n");
    }
}
