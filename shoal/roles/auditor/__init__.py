from shoal.roles.auditor.accounts import check_statement as check_statement
from shoal.roles.auditor.accounts import show_credits as show_credits
from shoal.roles.auditor.log import audit_folder as audit_folder
from shoal.roles.auditor.log import check as check
from shoal.roles.auditor.log import show as show
from shoal.roles.auditor.rollouts import Choice as Choice
from shoal.roles.auditor.rollouts import audit as audit
